//! Hashes of whole batches, so that samples, their order, draws and tensors stay the same bits whatever happens to the loader.

use data::segment::{MaskTransform, SyntheticMasks, SyntheticMasksSpec};
use data::{
    Batch, Cached, Dataset, Finish, Geometry, Interpolation, Loader, LoaderSettings, Preparation,
    RandAugment, Request, Sampler, Split, Subset, Synthetic, SyntheticSpec, Transform, fingerprint,
};
use std::sync::Arc;

const LEN: usize = 45;
const BATCH: usize = 7;

/// Hashes of images, of bytes for a device, of images with masks, and of their bytes, from when each task had a loader of its own.
const BATCHES: [u64; 4] =
    [0x07a7_39b6_98c7_0f2a, 0xa8b8_dec1_c824_3c91, 0x36f1_9afa_8c17_0d86, 0x2cad_6927_65e4_94a0];
const FINGERPRINTS: [u64; 2] = [0xbd87_44eb_fe33_7947, 0x5d34_91ac_4c5f_4b5e];

/// FNV-1a of all that a model or a device reads.
fn hash(batches: &[Batch]) -> u64 {
    let mut bytes: Vec<u8> = vec![];
    for batch in batches {
        let numbers = [&batch.choices, &batch.extents, &batch.labels, &batch.partners];
        numbers.into_iter().flatten().for_each(|x| bytes.extend(x.to_le_bytes()));
        let values = [&batch.images, &batch.mix, &batch.weights];
        values.into_iter().flatten().for_each(|x| bytes.extend(x.to_le_bytes()));
        let count = batch.pixels.len().min(batch.request.count * batch.pixels.len() / BATCH);
        bytes.extend(&batch.pixels[..if batch.choices.is_empty() { count } else { 0 }]);
        bytes.extend(&batch.masks);
        batch.indices.iter().for_each(|&x| bytes.extend((x as u64).to_le_bytes()));
    }
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, step)
}

fn loaded(set: Arc<dyn Dataset>, preparation: Preparation, workers: usize) -> u64 {
    let sampler = Sampler { len: set.len(), seed: 9, shuffle: true };
    let settings = LoaderSettings { sampler, batch: BATCH, workers, depth: 3, skip_bad: false };
    let len = set.len();
    let requests = (0..2).flat_map(move |epoch| {
        let firsts = (0..len).step_by(BATCH);
        firsts.map(move |first| Request { epoch, first, count: BATCH.min(len - first) })
    });
    let mut loader = Loader::new(set, preparation, settings, requests).unwrap();
    let mut batches = vec![];
    while let Some(batch) = loader.next_batch().unwrap() {
        batches.push(batch.clone());
    }
    hash(&batches)
}

fn labelled() -> Arc<dyn Dataset> {
    let spec = SyntheticSpec {
        split: Split::Train,
        len: 2 * LEN,
        image_size: 20,
        channels: 3,
        classes: 10,
        seed: 4,
    };
    Subset::of(Arc::new(Synthetic::new(spec).unwrap()), LEN)
}

fn masked() -> Arc<dyn Dataset> {
    let (len, width, height) = (2 * LEN, 40, 30);
    let spec =
        SyntheticMasksSpec { split: Split::Train, len, width, height, channels: 3, classes: 6, seed: 4 };
    Subset::of(Arc::new(SyntheticMasks::new(spec).unwrap()), LEN)
}

#[test]
fn batches_are_the_same_bits_as_ever() {
    let plain = Transform::evaluation(16, None, &[0.4; 3], &[0.3; 3], Interpolation::Bilinear);
    let transform = Transform {
        geometry: Geometry::RandomResizedCrop { scale: (0.3, 1.0), ratio: (0.75, 1.5) },
        flip: 0.5,
        rand_augment: Some(RandAugment { ops: 2, magnitude: 9 }),
        erase: 0.4,
        mixup: 0.8,
        cutmix: 1.0,
        ..plain
    };
    let masks = MaskTransform::plain(24, 32, &[0.4; 3], &[0.3; 3]).with_crops().with_distortion();
    let finish = Arc::new(Finish::of(&transform, &*labelled()).unwrap());
    for workers in [0, 3] {
        let found = [
            loaded(labelled(), transform.clone().into(), workers),
            loaded(
                labelled(),
                Preparation::Labels { transform: transform.clone(), finish: Some(finish.clone()) },
                workers,
            ),
            loaded(Arc::new(Cached::new(masked(), 1 << 30)), masks.clone().into(), workers),
            loaded(masked(), Preparation::Masks { transform: masks.clone(), finished: false }, workers),
        ];
        let fingerprints = [fingerprint(&*labelled()), fingerprint(&*masked())];
        assert_eq!((found, fingerprints), (BATCHES, FINGERPRINTS), "{workers} threads");
    }
}
