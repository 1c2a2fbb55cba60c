//! Synthetic set with masks: learnable, deterministic, and there without a download.
//!
//! Two to five shapes lie on a plain ground, later ones over earlier ones. A pixel's class is the shape it shows; place,
//! size, tilt, colours, shading and noise are drawn independently of it. Class 0 is the ground, the others are the shapes of
//! the [`crate::synthetic`] set.
//!
//! Sample i is a pure function of (seed, split, i, width, height, channels, classes), with the same bytes on every platform.

use crate::limits::{SYNTHETIC_CHANNELS, SYNTHETIC_SIDES, within};
use crate::random::{Stream, key, noise};
use crate::registry::{Entry, Facts, Images, Open};
use crate::synthetic::scene::{Wave, direction};
use crate::synthetic::shape::{Shape, length};
use crate::{DataError, Dataset, Sample, Split, SyntheticSpec, Task};
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Classes that the set may have, the ground among them.
pub const CLASSES: RangeInclusive<usize> = 2..=1 + Shape::ALL.len();

/// Entry of the registry.
pub(crate) const ENTRY: Entry = Entry {
    name: "synthetic-masks",
    place: None,
    task: Task::Segment,
    about: "synthetic images of some shapes each, with masks",
    image_size: 64,
    images: Images::Synthetic,
    facts: Some(Facts { train_images: 2_000, test_images: 200, classes: 5, channels: 3 }),
    run: None,
    archive: None,
    open: Open::Synthetic(|spec| Ok(Arc::new(SyntheticMasks::new(SyntheticMasksSpec::square(spec))?))),
};

/// Keeps these draws apart from those of the other synthetic set.
const MASKS: u64 = 0x6d61_736b;
const GROUND: &str = "ground";

const SHAPES: RangeInclusive<u64> = 2..=5;
/// Half the shorter side is one unit of place, and of a shape's radius.
const RADIUS: (f32, f32) = (0.35, 0.7);
/// Places that are drawn for a shape, of which it takes the one where it covers least of those before.
const PLACES: usize = 8;
/// The difference of a shape and the ground in each channel; half the range leaves room on one side at least.
const CONTRAST: (f32, f32) = (0.25, 0.5);
const NOISE: (f32, f32) = (0.01, 0.06);
/// Small enough that stripes stay what they are.
const MAX_TILT_HALF_TANGENT: f32 = 0.15;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyntheticMasksSpec {
    pub split: Split,
    pub len: usize,
    pub width: usize,
    pub height: usize,
    pub channels: usize,
    /// Number of classes, with the ground.
    pub classes: usize,
    pub seed: u64,
}

impl SyntheticMasksSpec {
    /// Square images, as the synthetic set without masks has them.
    pub fn square(spec: SyntheticSpec) -> Self {
        let SyntheticSpec { split, len, image_size, channels, classes, seed } = spec;
        Self { split, len, width: image_size, height: image_size, channels, classes, seed }
    }
}

/// The synthetic set with masks. Any `len` is fine: a longer set starts with the images of a shorter one.
#[derive(Clone, Debug)]
pub struct SyntheticMasks {
    spec: SyntheticMasksSpec,
    class_names: Vec<String>,
}

impl SyntheticMasks {
    pub fn new(spec: SyntheticMasksSpec) -> Result<Self, DataError> {
        let SyntheticMasksSpec { width, height, channels, classes, .. } = spec;
        within("classes", classes, &CLASSES, "synthetic masks have so many")?;
        for side in [width, height] {
            within("image-size", side, &SYNTHETIC_SIDES, "synthetic masks can have these sizes")?;
        }
        within("channels", channels, &SYNTHETIC_CHANNELS, "images with synthetic masks have so many")?;
        let shapes = Shape::ALL.iter().take(classes - 1).map(|shape| shape.name());
        let class_names = std::iter::once(GROUND).chain(shapes).map(String::from).collect();
        Ok(Self { spec, class_names })
    }

    fn scene(&self, index: usize) -> Scene {
        let key = key(&[self.spec.seed, MASKS, self.spec.split.number(), index as u64]);
        Scene::new(&self.spec, key)
    }
}

impl Dataset for SyntheticMasks {
    fn len(&self) -> usize {
        self.spec.len
    }

    fn class_names(&self) -> &[String] {
        &self.class_names
    }

    fn channels(&self) -> usize {
        self.spec.channels
    }

    fn task(&self) -> Task {
        Task::Segment
    }

    fn name(&self, index: usize) -> String {
        format!("{} image {index} of synthetic-masks", self.spec.split)
    }

    fn read(&self, index: usize, out: &mut Sample) -> Result<(), DataError> {
        if index >= self.len() {
            return Err(DataError::IndexOutOfRange { index, len: self.len() });
        }
        self.scene(index).paint(&self.spec, out);
        Ok(())
    }
}

struct Scene {
    shapes: Vec<Placed>,
    ground: Vec<f32>,
    shading: Wave,
    noise: f32,
    noise_key: u32,
}

/// A shape at its place.
struct Placed {
    shape: Shape,
    label: u8,
    centre: (f32, f32),
    radius: f32,
    /// Cosine and sine.
    tilt: (f32, f32),
    colour: Vec<f32>,
    shading: Wave,
}

impl Scene {
    fn new(spec: &SyntheticMasksSpec, key: u64) -> Self {
        let mut stream = Stream::new(key);
        let ground: Vec<f32> = (0..spec.channels).map(|_| stream.between(0.0, 1.0)).collect();
        let count = SHAPES.start() + stream.below(SHAPES.end() - SHAPES.start() + 1);
        let mut shapes = vec![];
        (0..count).for_each(|_| shapes.push(Placed::new(spec, &ground, &shapes, &mut stream)));
        let (shading, noise) = (Wave::new(&mut stream), stream.between(NOISE.0, NOISE.1));
        Scene { shapes, ground, shading, noise, noise_key: stream.bits() as u32 }
    }

    fn paint(&self, spec: &SyntheticMasksSpec, out: &mut Sample) {
        let &SyntheticMasksSpec { width, height, channels, .. } = spec;
        let pixel = 2.0 / width.min(height) as f32;
        out.mask.resize(width * height, 0);
        let pixels = out.image.reset(width, height, channels);
        let mut colour = vec![0.0; channels];
        for (place, (label, bytes)) in out.mask.iter_mut().zip(pixels.chunks_exact_mut(channels)).enumerate()
        {
            let x = ((place % width) as f32 + 0.5 - width as f32 / 2.0) * pixel;
            let y = (height as f32 / 2.0 - (place / width) as f32 - 0.5) * pixel;
            colour.copy_from_slice(&self.ground);
            let mut shade = self.shading.at(x, y);
            *label = 0;
            for shape in &self.shapes {
                let outside = shape.distance(x, y) / pixel;
                if outside < 0.0 {
                    *label = shape.label;
                }
                let cover = (0.5 - outside).clamp(0.0, 1.0);
                if cover > 0.0 {
                    colour.iter_mut().zip(&shape.colour).for_each(|(c, own)| *c += (own - *c) * cover);
                    shade += (shape.shading.at(x, y) - shade) * cover;
                }
            }
            for (channel, byte) in bytes.iter_mut().enumerate() {
                let counter = self.noise_key.wrapping_add((place * channels + channel) as u32);
                let value = colour[channel] + shade + self.noise * noise(counter);
                *byte = (value.clamp(0.0, 1.0) * 255.0 + 0.5) as u8;
            }
        }
    }
}

impl Placed {
    fn new(spec: &SyntheticMasksSpec, ground: &[f32], before: &[Placed], stream: &mut Stream) -> Self {
        let class = stream.below(spec.classes as u64 - 1) as usize;
        let short = spec.width.min(spec.height) as f32;
        let radius = stream.between(RADIUS.0, RADIUS.1);
        let mut along = |side: usize| {
            let room = side as f32 / short - radius;
            stream.between(-room, room)
        };
        let apart = |(x, y): (f32, f32)| {
            let gap = |other: &Placed| length(x - other.centre.0, y - other.centre.1) - radius - other.radius;
            before.iter().map(gap).fold(0.0, f32::min)
        };
        let mut centre = (along(spec.width), along(spec.height));
        for _ in 1..PLACES {
            let other = (along(spec.width), along(spec.height));
            if apart(other) > apart(centre) {
                centre = other;
            }
        }
        let colour = ground.iter().map(|&ground| contrasting(ground, stream)).collect();
        let tilt = direction(stream.between(-MAX_TILT_HALF_TANGENT, MAX_TILT_HALF_TANGENT));
        let shading = Wave::new(stream);
        Placed { shape: Shape::ALL[class], label: 1 + class as u8, centre, radius, tilt, colour, shading }
    }

    /// Distance from the outline, negative inside.
    fn distance(&self, x: f32, y: f32) -> f32 {
        let (dx, dy) = ((x - self.centre.0) / self.radius, (y - self.centre.1) / self.radius);
        let (cos, sin) = self.tilt;
        self.shape.distance(cos * dx + sin * dy, cos * dy - sin * dx) * self.radius
    }
}

fn contrasting(ground: f32, stream: &mut Stream) -> f32 {
    let contrast = stream.between(CONTRAST.0, CONTRAST.1);
    let brighter = stream.coin();
    let (up, down) = (ground + contrast, ground - contrast);
    if up > 1.0 || (!brighter && down >= 0.0) { down } else { up }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: SyntheticMasksSpec = SyntheticMasksSpec {
        split: Split::Train,
        len: 200,
        width: 48,
        height: 32,
        channels: 3,
        classes: 11,
        seed: 0,
    };

    fn pair(spec: SyntheticMasksSpec, index: usize) -> Sample {
        let mut pair = Sample::default();
        SyntheticMasks::new(spec).unwrap().read(index, &mut pair).unwrap();
        pair
    }

    /// Scores are quoted for this set. Drawing it otherwise makes them another set's.
    #[test]
    fn the_set_has_not_changed() {
        assert_eq!(crate::fingerprint(&SyntheticMasks::new(SPEC).unwrap()), 2_786_539_663_142_460_237);
    }

    #[test]
    fn a_pair_depends_on_seed_split_and_index_but_not_on_length() {
        let first = pair(SPEC, 5);
        assert_eq!((first.image.width, first.image.height, first.mask.len()), (48, 32, 48 * 32));
        assert_eq!(first, pair(SyntheticMasksSpec { len: 6, ..SPEC }, 5));
        assert_ne!(first, pair(SPEC, 6));
        assert_ne!(first, pair(SyntheticMasksSpec { seed: 1, ..SPEC }, 5));
        assert_ne!(first, pair(SyntheticMasksSpec { split: Split::Test, ..SPEC }, 5));
    }

    /// Every class is seen, no label is beyond them, and shapes stand out from the ground.
    #[test]
    fn masks_show_where_shapes_are() {
        for classes in [2, 5, 11] {
            let mut seen = vec![0usize; classes];
            let (mut inside, mut outside) = (0.0, 0.0);
            for index in 0..SPEC.len {
                let Sample { image, mask } = pair(SyntheticMasksSpec { classes, channels: 1, ..SPEC }, index);
                mask.iter().for_each(|&label| seen[usize::from(label)] += 1);
                let ground: Vec<f64> = mask
                    .iter()
                    .zip(&image.pixels)
                    .filter(|(l, _)| **l == 0)
                    .map(|(_, &p)| f64::from(p))
                    .collect();
                let mean = ground.iter().sum::<f64>() / ground.len() as f64;
                let apart = |shape: bool| {
                    let chosen = mask.iter().zip(&image.pixels).filter(|(l, _)| (**l > 0) == shape);
                    let (sum, count) = chosen
                        .fold((0.0, 0.0), |(sum, n), (_, &p)| (sum + (f64::from(p) - mean).abs(), n + 1.0));
                    sum / f64::max(count, 1.0)
                };
                inside += apart(true);
                outside += apart(false);
            }
            let total = seen.iter().sum::<usize>();
            assert!(seen.iter().all(|&pixels| pixels > total / 200), "{classes}: {seen:?}");
            assert!(seen[0] > total / 4 && seen[0] < total * 3 / 4, "{classes}: {seen:?}");
            assert!(inside > 3.0 * outside, "{classes}: {inside} within shapes, {outside} on the ground");
        }
    }

    #[test]
    fn settings_out_of_range_are_refused() {
        let refusal = |spec| SyntheticMasks::new(spec).unwrap_err().to_string();
        assert_eq!(
            refusal(SyntheticMasksSpec { classes: 12, ..SPEC }),
            "--classes 12: must be from 2 to 11: synthetic masks have so many"
        );
        assert!(refusal(SyntheticMasksSpec { height: 7, ..SPEC }).starts_with("--image-size 7: "));
        assert!(refusal(SyntheticMasksSpec { channels: 0, ..SPEC }).starts_with("--channels 0: "));
        let read = SyntheticMasks::new(SPEC).unwrap().read(200, &mut Sample::default());
        assert_eq!(read, Err(DataError::IndexOutOfRange { index: 200, len: 200 }));
    }
}
