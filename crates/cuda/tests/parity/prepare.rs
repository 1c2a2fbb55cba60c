//! Images made on the GPU against those that the host prepares: bit for bit.

use cuda::{Executor, Options, Which};
use data::{
    Batch, DataError, Dataset, Finish, Geometry, Interpolation, Loader, LoaderSettings, Preparation,
    RandAugment, Request, Sample, Sampler, Transform,
};
use graph::{Builder, DType, Delivery, Header, Key, Model, StateId, inference, prepare};
use std::sync::Arc;

/// Images of one size, if that is told.
struct Noise {
    len: usize,
    size: (usize, usize),
    channels: usize,
    told: bool,
}

impl Dataset for Noise {
    fn len(&self) -> usize {
        self.len
    }
    fn class_names(&self) -> &[String] {
        &[]
    }
    fn channels(&self) -> usize {
        self.channels
    }
    fn name(&self, index: usize) -> String {
        index.to_string()
    }
    fn size(&self) -> Option<(usize, usize)> {
        self.told.then_some(self.size)
    }
    fn read(&self, index: usize, out: &mut Sample) -> Result<(), DataError> {
        let pixels = out.image.reset(self.size.0, self.size.1, self.channels);
        let byte = |i: usize| (i * i * 31 + index * 7919 + i * (index + 3)) >> 3;
        pixels.iter_mut().enumerate().for_each(|(i, out)| *out = byte(i) as u8);
        Ok(())
    }
}

struct Case {
    set: Arc<Noise>,
    transform: Transform,
    finish: Arc<Finish>,
    batch: usize,
    request: Request,
}

impl Case {
    fn new(set: Noise, transform: Transform, batch: usize, resident: bool) -> Self {
        let finish = Finish::of(&transform, &set).unwrap();
        let finish = Arc::new(if resident { finish.with_resident(set.len) } else { finish });
        // From an odd position on, so that partners lie outside; the last place is padding.
        let request = Request { epoch: 1, first: 3, count: batch - 1 };
        Case { set: Arc::new(set), transform, finish, batch, request }
    }

    fn settings(&self) -> LoaderSettings {
        let sampler = Sampler { len: self.set.len, seed: 3, shuffle: true };
        LoaderSettings { sampler, batch: self.batch, workers: 0, depth: 1, skip_bad: false }
    }

    /// (images as the host prepares them, bytes and choices)
    fn load(&self) -> (Batch, Batch) {
        let (set, transform, one) = (&self.set, &self.transform, std::iter::once(self.request));
        let mut host = Loader::new(set.clone(), transform.clone(), self.settings(), one.clone()).unwrap();
        let finish = Arc::clone(&self.finish);
        let preparation = Preparation::Labels { transform: transform.clone(), finish: Some(finish) };
        let mut left = Loader::new(set.clone(), preparation, self.settings(), one).unwrap();
        let batch = |loader: &mut Loader| loader.next_batch().unwrap().unwrap().clone();
        (batch(&mut host), batch(&mut left))
    }

    fn executor(&self) -> Executor {
        let Transform { size, channels, .. } = self.transform;
        let mut b = Builder::new(DType::F32, false);
        let images = b.input("images", DType::F32, [self.batch, channels, size, size]);
        let graph = b.finish(&[images]).unwrap();
        let model = Model { train: graph.clone(), eval: graph, key: Key::default() };
        let &Finish { height, width, resident, .. } = &*self.finish;
        let (images, taps) = (self.finish.images(self.batch), self.finish.taps_shape());
        let delivery = Delivery { height, width, images, resident: resident.is_some(), taps };
        let program =
            inference(prepare(model, None, Some(&delivery)).unwrap(), None, &cuda::Target::of(0, false))
                .unwrap();
        program.eval.check().unwrap();
        let options = Options { device: 0, seed: 1, deterministic: true, tf32: false, comm: None };
        let mut executor = Executor::new(program, options).unwrap();
        let mut put = |name: &str, bytes: Vec<u8>| {
            let id: StateId = executor.find_state(name).unwrap();
            executor.set_state_bytes(id, &bytes).unwrap();
        };
        put("eval.levels", self.finish.levels().iter().flat_map(|x| x.to_le_bytes()).collect());
        if taps.is_some() {
            put("eval.taps", self.finish.taps().iter().flat_map(|x| x.to_le_bytes()).collect());
        }
        if resident.is_some() {
            let (mut all, mut sample) = (vec![], Sample::default());
            for index in 0..self.set.len {
                self.set.read(index, &mut sample).unwrap();
                all.extend_from_slice(&sample.image.pixels);
            }
            put("eval.pixels", all);
        }
        executor
    }

    fn upload(&self, executor: &mut Executor, batch: &Batch) {
        if self.finish.resident.is_none() {
            executor.upload_u8(Which::Eval, "pixels", &batch.pixels).unwrap();
        }
        executor.upload_i32(Which::Eval, "choices", &batch.choices).unwrap();
    }
}

const HEADER: Header = Header { seed: 0, step: 0, first_sample: 0, learning_rate: 0.0, nominal: 1.0 };

fn transform(size: usize, channels: usize, geometry: Geometry, interpolation: Interpolation) -> Transform {
    let (mean, std) = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]);
    let plain = Transform::evaluation(size, None, &mean[..channels], &std[..channels], interpolation);
    Transform { geometry, flip: 0.5, erase: 0.5, mixup: 0.8, cutmix: 1.0, ..plain }
}

#[test]
#[ignore = "needs a GPU"]
fn images_are_those_of_the_host() {
    let geometries = |size: usize| {
        [
            Geometry::Resize,
            Geometry::CenterCrop { resize: size + size / 7 },
            Geometry::PadCrop { padding: size / 8 },
            Geometry::RandomResizedCrop { scale: (0.08, 1.0), ratio: (0.75, 4.0 / 3.0) },
        ]
    };
    // (size, images, channels, whether their size is known, whether they lie on the GPU)
    let shapes = [
        (224, (32, 32), 3, true, true),
        (224, (32, 32), 3, true, false),
        (224, (80, 60), 3, false, false),
        (32, (32, 32), 3, true, true),
        (30, (31, 28), 1, true, false),
        (24, (50, 40), 3, true, true),
        (13, (32, 9), 2, true, false),
    ];
    let mut compared = 0;
    for (size, source, channels, told, resident) in shapes {
        for geometry in geometries(size) {
            for how in [Interpolation::Bilinear, Interpolation::Bicubic] {
                for ops in [0, 2] {
                    let mut transform = transform(size, channels, geometry, how);
                    let rand_augment = RandAugment { ops, magnitude: 9 };
                    transform.rand_augment = (channels != 2).then_some(rand_augment);
                    let set = Noise { len: 43, size: source, channels, told };
                    let case = Case::new(set, transform, 24, resident);
                    let (host, left) = case.load();
                    let mut executor = case.executor();
                    case.upload(&mut executor, &left);
                    executor.run(Which::Eval, &HEADER).unwrap();
                    let found = executor.read_f32(Which::Eval, "images").unwrap().unwrap();
                    let worst =
                        found.iter().zip(&host.images).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    let same = found.iter().zip(&host.images).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert_eq!(found.len(), host.images.len());
                    assert!(
                        same,
                        "{source:?} to {size}, {geometry:?}, {how:?}, {ops} operations: {worst:.1e} apart"
                    );
                    compared += 1;
                }
            }
        }
    }
    println!("{compared} batches, all the same bit for bit");
}

/// How long it takes at the size that matters.
#[test]
#[ignore = "needs a GPU"]
fn images_of_a_large_batch_take_microseconds() {
    let pad = Geometry::PadCrop { padding: 28 };
    let plain = |t: Transform| Transform { erase: 0.0, mixup: 0.0, cutmix: 0.0, ..t };
    let all = transform(224, 3, pad, Interpolation::Bilinear);
    let bicubic = transform(224, 3, pad, Interpolation::Bicubic);
    for (name, transform, told) in [
        ("32 px, shifted and mirrored", plain(all.clone()), true),
        ("32 px, everything", all.clone(), true),
        ("32 px, everything, bicubic", bicubic, true),
        ("bytes of 224 px", plain(all.clone()), false),
    ] {
        let set = Noise { len: 300, size: (32, 32), channels: 3, told };
        let case = Case::new(set, transform, 256, told);
        let mut executor = case.executor();
        let (_, left) = case.load();
        case.upload(&mut executor, &left);
        let times = executor.profile(Which::Eval, &HEADER, 20).unwrap();
        let seconds: f64 = times.iter().map(|t| t.seconds).sum();
        let rate = times.iter().map(|t| t.bytes).sum::<f64>() / seconds / 1e12;
        println!("{name}: {:.1} µs, {rate:.2} TB/s", seconds * 1e6);
        assert!(seconds < 1e-3);
    }
}
