//! Evaluation of pixels, in images of any size: as wholes, or through windows.
//!
//! An image is resized to fit into the box of its run; then a model reads windows of it, of one size: that of its training, or, as a
//! whole, one window of about the image's own size. Plans are for windows of one size, so images are taken in groups, and in a group
//! size by size.

use crate::error::TrainError;
use crate::segmentation::{PixelConfusion, PixelScore};
use crate::session::{Session, evaluation_header};
use comm::Reduction;
use config::{EvalMode, Resolved};
use data::segment::{Canvas, Grid, IGNORED, Ladder, MaskFinish, WholeImage, Windows, resized_mask};
use data::{CropBox, DataError, Dataset, Image, Interpolation, Resizer, Sample, Skipped};
use devices::Real;
use devices::device::{Inputs, Which, planned, target};
use graph::op::Lane;
use graph::{Key, Loss, Plan, Program};
use std::collections::BTreeSet;

/// Images that are looked at size by size: enough that plans seldom change, few enough that memory stays small.
const GROUP: usize = 64;
/// Sides of wholes are padded to one of so many lengths, multiples of what every patch divides.
const RUNGS: usize = 16;
const MULTIPLE: usize = 32;

/// What a model says of an image.
pub struct Answer<'a> {
    /// Its number in the validation set.
    pub index: usize,
    pub sample: &'a Sample,
    /// The most probable class of every pixel.
    pub labels: &'a [u8],
}

/// How images of a run are looked at.
struct Look {
    fit: (usize, usize),
    /// (width, height) of a window, and the distance to the next; none for wholes.
    windows: Option<((usize, usize), (usize, usize))>,
    ladder: Ladder,
    finish: MaskFinish,
    classes: usize,
    resizer: Resizer,
}

impl Look {
    fn of(run: &Resolved) -> Result<Self, TrainError> {
        let (Some(pixels), Some(transform)) = (&run.pixels, run.mask_transform()) else {
            let problem = format!("{} gives one class for each image", run.model);
            return Err(DataError::Call { what: "an evaluation of pixels", problem }.into());
        };
        let ([height, width], stride) = (run.network.size(), pixels.eval_stride);
        let windows = match pixels.eval_mode {
            EvalMode::Whole => None,
            EvalMode::Slide => Some(((width, height), (stride, stride))),
        };
        Ok(Look {
            fit: pixels.fit,
            windows,
            ladder: Ladder::new(pixels.fit.0.max(pixels.fit.1), MULTIPLE, RUNGS)?,
            finish: MaskFinish::of(&transform)?,
            classes: run.network.classes(),
            resizer: Resizer::new(),
        })
    }

    /// An image as it will be read.
    fn at(&mut self, index: usize, sample: Sample, own: (usize, usize)) -> Result<Held, TrainError> {
        let mut whole = WholeImage::of((sample.image.width, sample.image.height), self.fit, self.ladder);
        // No side is shorter than in training: what fits needs no plan of its own, and windows of attention are as they were.
        let side = |resized: usize, padded: usize, own: usize| if resized <= own { own } else { padded };
        let ((width, height), (columns, rows)) = (whole.resized, whole.padded);
        whole.padded = (side(width, columns, own.0), side(height, rows, own.1));
        let (size, stride) = self.windows.unwrap_or((whole.padded, whole.padded));
        let windows = Windows::of(whole.resized, size, stride)?;
        let mut image = Image::default();
        let all = CropBox::whole(&sample.image);
        self.resizer.resize(&sample.image, all, whole.resized, Interpolation::Bilinear, &mut image);
        let mask = resized_mask(&sample.mask, whole.original, whole.resized);
        let (unseen, is_whole) = (windows.places.len(), self.windows.is_none());
        Ok(Held {
            index,
            sample,
            image,
            mask,
            whole,
            windows,
            is_whole,
            canvas: None,
            unseen,
            labels: vec![],
        })
    }
}

/// An image that is being looked at.
struct Held {
    index: usize,
    sample: Sample,
    /// Resized, with its labels.
    image: Image,
    mask: Vec<u8>,
    whole: WholeImage,
    windows: Windows,
    is_whole: bool,
    /// What was said of its windows, until all are seen.
    canvas: Option<Canvas>,
    unseen: usize,
    labels: Vec<u8>,
}

impl Held {
    /// Takes in what was said of a window.
    fn take_in(&mut self, window: usize, grid: &Grid, threads: usize) -> Result<(), TrainError> {
        if self.is_whole {
            self.labels = self.whole.labels(grid, threads)?;
            return Ok(());
        }
        let canvas = self.canvas.get_or_insert_with(|| Canvas::new(self.whole.resized, grid.classes));
        canvas.add(self.windows.places[window], self.windows.size, grid, threads)?;
        self.unseen -= 1;
        if self.unseen == 0 {
            self.labels = canvas.labels(self.whole.original, threads)?;
            self.canvas = None;
        }
        Ok(())
    }
}

/// A batch of windows of one size.
struct Tiles {
    finish: MaskFinish,
    bytes: Vec<u8>,
    images: Vec<f32>,
    labels: Vec<i32>,
    weights: Vec<f32>,
}

impl Tiles {
    fn new(finish: &MaskFinish, (width, height): (usize, usize), batch: usize) -> Self {
        let (finish, area) = (finish.sized(height, width), width * height);
        Tiles {
            bytes: vec![0; area * finish.channels],
            images: vec![0.0; batch * area * finish.channels],
            labels: vec![0; batch * area],
            weights: vec![0.0; batch * area],
            finish,
        }
    }

    /// Nothing counts.
    fn clear(&mut self) {
        self.images.fill(0.0);
        self.labels.fill(0);
        self.weights.fill(0.0);
    }

    fn put(&mut self, place: usize, held: &Held, window: usize) -> Result<(), TrainError> {
        let extent = held.windows.cut(&held.image, window, &mut self.bytes)?;
        let (width, len) = (self.finish.width, self.bytes.len());
        self.finish.apply(&self.bytes, extent, &mut self.images[place * len..][..len]);
        let [rows, columns] = held.windows.extent(window);
        let ((left, top), from) = (held.windows.places[window], held.windows.image.0);
        let area = width * self.finish.height;
        for row in 0..rows {
            let mask = &held.mask[(top + row) * from + left..][..columns];
            let at = place * area + row * width;
            let out = self.labels[at..].iter_mut().zip(&mut self.weights[at..]);
            for ((label, weight), &mask) in out.zip(mask).filter(|(_, mask)| **mask != IGNORED) {
                (*label, *weight) = (i32::from(mask), 1.0);
            }
        }
        Ok(())
    }
}

impl<T: Real> Session<T> {
    /// Scores the validation set, each image on one rank; `each` sees the answers of this rank. Counts are those of all ranks, and the
    /// same for any number of them; the loss is the mean over all pixels that were read, as often as they were.
    pub fn evaluate_pixels(
        &mut self,
        mut each: impl FnMut(Answer<'_>) -> Result<(), TrainError>,
    ) -> Result<PixelScore, TrainError> {
        let set = std::sync::Arc::clone(&self.sets().test);
        self.device_mut().before_evaluation()?;
        let mut own = None;
        let evaluated = self.look_at(&*set, &mut own, &mut each);
        if let Some(own) = own {
            self.device_mut().rebind(own)?;
        }
        let (mut confusion, [mut loss, mut pixels, mut images]) = evaluated?;
        let world = self.world();
        if world.size() > 1 {
            let mut sums = [loss, pixels, images];
            world.all_reduce(world.name("evaluation"), Reduction::Sum, &mut sums)?;
            [loss, pixels, images] = sums;
            world.all_reduce(world.name("counts of pixels"), Reduction::Sum, confusion.counts_mut())?;
        }
        Ok(PixelScore { loss: loss / pixels, images: images as u64, confusion })
    }

    /// This rank's part: counts, and sums of losses, pixels read and images.
    fn look_at(
        &mut self,
        set: &dyn Dataset,
        own: &mut Option<Program>,
        each: &mut dyn FnMut(Answer<'_>) -> Result<(), TrainError>,
    ) -> Result<(PixelConfusion, [f64; 3]), TrainError> {
        let mut look = Look::of(self.resolved())?;
        let (rank, ranks) = (self.world().rank(), self.world().size());
        let (mut confusion, mut sums) = (PixelConfusion::new(look.classes), [0.0; 3]);
        let mine: Vec<usize> = (rank..set.len()).step_by(ranks).collect();
        let groups = set.len().div_ceil(ranks).div_ceil(GROUP);
        for group in 0..groups {
            let indices = mine.chunks(GROUP).nth(group).unwrap_or_default();
            let mut group = self.read_group(set, indices, &mut look)?;
            let sizes: BTreeSet<(usize, usize)> = group.iter().map(|held| held.windows.size).collect();
            let beside = self.runs_beside(&group, &sizes, own)?;
            for size in sizes {
                let [loss, pixels] = self.look_through(size, &mut group, &look, own)?;
                (sums[0], sums[1]) = (sums[0] + loss, sums[1] + pixels);
            }
            (0..beside).try_for_each(|_| self.look_at_nothing(&look))?;
            for Held { index, sample, labels, .. } in &group {
                sums[2] += 1.0;
                confusion.add(&sample.mask, labels).map_err(|error| {
                    TrainError::Data(DataError::Image { image: set.name(*index), problem: error.to_string() })
                })?;
                each(Answer { index: *index, sample, labels })?;
            }
        }
        Ok((confusion, sums))
    }

    /// Runs of the plan that other ranks need of this one, beside those for its own images: where ranks divide parameters or averages, they
    /// gather them in every run, all together.
    fn runs_beside(
        &self,
        group: &[Held],
        sizes: &BTreeSet<(usize, usize)>,
        own: &Option<Program>,
    ) -> Result<u64, TrainError> {
        let program = self.device().program();
        if !program.eval.steps.iter().any(|step| step.lane == Lane::Comm) {
            return Ok(0);
        }
        let Key { batch, height, width } = own.as_ref().unwrap_or(program).eval.key;
        let runs = |size: &(usize, usize)| {
            let of_size = group.iter().filter(|held| held.windows.size == *size);
            let windows: usize = of_size.map(|held| held.windows.places.len()).sum();
            windows.div_ceil(if *size == (width, height) { batch } else { 1 }) as u64
        };
        let (mine, world) = (sizes.iter().map(runs).sum::<u64>(), self.world());
        let mut most = [mine as f64];
        world.all_reduce(world.name("runs of an evaluation"), Reduction::Max, &mut most)?;
        Ok(most[0] as u64 - mine)
    }

    /// Runs the plan of evaluation on nothing, with the other ranks.
    fn look_at_nothing(&mut self, look: &Look) -> Result<(), TrainError> {
        let Key { batch, height, width } = self.device().program().eval.key;
        let Tiles { images, labels, weights, .. } = &Tiles::new(&look.finish, (width, height), batch);
        let inputs = Inputs { images, labels, weights, ..Inputs::default() };
        self.device_mut().load(Which::Eval, &inputs)?;
        Ok(self.device_mut().run(Which::Eval, &evaluation_header(1.0))?)
    }

    fn read_group(
        &mut self,
        set: &dyn Dataset,
        indices: &[usize],
        look: &mut Look,
    ) -> Result<Vec<Held>, TrainError> {
        let [height, width] = self.resolved().network.size();
        let mut group = Vec::with_capacity(indices.len());
        for &index in indices {
            let mut sample = Sample::default();
            match set.read(index, &mut sample) {
                Ok(()) => group.push(look.at(index, sample, (width, height))?),
                Err(error) if self.resolved().data.skip_bad_images => {
                    let (name, problem) = (set.name(index), error.to_string());
                    self.note_skipped(Skipped { index, name, problem });
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(group)
    }

    /// All windows of one size of a group. Sums of losses and of the pixels they are of.
    fn look_through(
        &mut self,
        size: (usize, usize),
        group: &mut [Held],
        look: &Look,
        own: &mut Option<Program>,
    ) -> Result<[f64; 2], TrainError> {
        let batch = self.bind_for(size, own)?;
        let mut tiles = Tiles::new(&look.finish, size, batch);
        let of_size = group.iter().enumerate().filter(|(_, held)| held.windows.size == size);
        let all: Vec<(usize, usize)> =
            of_size.flat_map(|(at, held)| (0..held.windows.places.len()).map(move |w| (at, w))).collect();
        let [_, rows, columns, _] = self.logits_shape();
        let per_window = rows * columns * look.classes;
        let header = evaluation_header((batch * size.0 * size.1) as f64);
        let mut sums = [0.0; 2];
        for windows in all.chunks(batch) {
            tiles.clear();
            for (place, &(at, window)) in windows.iter().enumerate() {
                tiles.put(place, &group[at], window)?;
            }
            let Tiles { images, labels, weights, .. } = &tiles;
            let inputs = Inputs { images, labels, weights, ..Inputs::default() };
            self.device_mut().load(Which::Eval, &inputs)?;
            self.device_mut().run(Which::Eval, &header)?;
            let stats = planned(self.device().output(Which::Eval, "loss.stats")?);
            sums.iter_mut().zip(stats.iter()).for_each(|(sum, x)| *sum += x.to_f64());
            let logits = T::singles(planned(self.device().output(Which::Eval, "head")?));
            for (place, &(at, window)) in windows.iter().enumerate() {
                let logits = &logits[place * per_window..][..per_window];
                let grid = Grid { width: columns, height: rows, classes: look.classes, logits };
                group[at].take_in(window, &grid, self.resolved().threads)?;
            }
        }
        Ok(sums)
    }

    /// Of what the plan of evaluation says of a batch: it is brought to the size of pixels here, and at once to that of the original.
    fn logits_shape(&self) -> [usize; 4] {
        let Plan { values, outputs, .. } = &self.device().program().eval;
        let head = outputs.iter().map(|value| &values[*value]).find(|value| value.name == "head");
        planned(head.and_then(|head| <[usize; 4]>::try_from(&head.ty.shape.0[..]).ok()))
    }

    /// Lets the plan of evaluation be one for images of (width, height), and gives its batch. `own` is the program that the session
    /// had, once another took its place.
    fn bind_for(
        &mut self,
        (width, height): (usize, usize),
        own: &mut Option<Program>,
    ) -> Result<usize, TrainError> {
        let is_for = |program: &Program| (program.eval.key.width, program.eval.key.height) == (width, height);
        if is_for(self.device().program()) {
            return Ok(self.device().program().eval.key.batch);
        }
        let before = own.get_or_insert_with(|| self.device().program().clone()).clone();
        let program = if is_for(&before) {
            before
        } else {
            // One image: it may be large. All else stays as it was.
            let network = planned(self.resolved().network.sized([height, width]));
            let model = network.build(1, Loss::default(), <T as Real>::DTYPE)?;
            let (run, states) = (self.resolved(), &before.states);
            let eval = graph::evaluation(model, states, before.last.mesh, run.mixed(), &*target(run))?;
            Program { eval, ..before }
        };
        let batch = program.eval.key.batch;
        self.device_mut().rebind(program)?;
        Ok(batch)
    }
}
