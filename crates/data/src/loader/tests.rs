use super::*;
use crate::{Finish, Geometry, Interpolation, RandAugment, Sample, Skipped, Transform};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

const SIZE: usize = 12;
const LEN: usize = 37;

/// The whole of a set in order, once.
fn in_order(len: usize, batch: usize) -> impl Iterator<Item = Request> + Send {
    let batch = batch.max(1);
    (0..len).step_by(batch).map(move |first| Request { epoch: 0, first, count: batch.min(len - first) })
}

/// Images that differ in every byte; some may be broken, slow, or make the reader panic.
#[derive(Default)]
struct Numbered {
    bad: Vec<usize>,
    panics: Vec<usize>,
    pause: Duration,
    reads: AtomicUsize,
    names: Vec<String>,
}

impl Dataset for Numbered {
    fn len(&self) -> usize {
        LEN
    }
    fn class_names(&self) -> &[String] {
        &self.names
    }
    fn channels(&self) -> usize {
        3
    }
    fn label(&self, index: usize) -> usize {
        index
    }
    fn name(&self, index: usize) -> String {
        format!("{index}.png")
    }
    fn read(&self, index: usize, out: &mut Sample) -> Result<(), DataError> {
        std::thread::sleep(self.pause);
        self.reads.fetch_add(1, Ordering::Relaxed);
        assert!(!self.panics.contains(&index), "what a decoder may do");
        if self.bad.contains(&index) {
            return Err(DataError::file(self.name(index), "broken"));
        }
        let (width, height) = (SIZE + index % 3, SIZE);
        let pixels = out.image.reset(width, height, 3);
        pixels.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 7 + index * 31) as u8);
        Ok(())
    }
}

/// Everything that can be on.
fn rich() -> Transform {
    Transform {
        geometry: Geometry::RandomResizedCrop { scale: (0.3, 1.0), ratio: (0.75, 1.5) },
        flip: 0.5,
        rand_augment: Some(RandAugment { ops: 2, magnitude: 9 }),
        erase: 0.5,
        mixup: 0.8,
        cutmix: 1.0,
        ..plain()
    }
}

fn plain() -> Transform {
    Transform::evaluation(SIZE, None, &[0.5; 3], &[0.25; 3], Interpolation::Bilinear)
}

fn settings(batch: usize, workers: usize) -> LoaderSettings {
    let sampler = Sampler { len: LEN, seed: 5, shuffle: true };
    LoaderSettings { sampler, batch, workers, depth: 3, skip_bad: true }
}

fn loader(set: Numbered, settings: LoaderSettings, requests: Vec<Request>) -> Loader {
    Loader::new(Arc::new(set), rich(), settings, requests.into_iter()).unwrap()
}

fn load(set: Numbered, settings: LoaderSettings, requests: &[Request]) -> Vec<Batch> {
    let mut loader = loader(set, settings, requests.to_vec());
    let mut batches = Vec::new();
    while let Some(batch) = loader.next_batch().unwrap() {
        batches.push(batch.clone());
    }
    batches
}

/// Two epochs in batches, the last of each partial.
fn two_epochs(batch: usize) -> Vec<Request> {
    let epoch = |epoch| in_order(LEN, batch).map(move |request| Request { epoch, ..request });
    (0..2).flat_map(epoch).collect()
}

/// What a model sees at each position of each epoch.
type Seen = HashMap<(u64, usize), (Vec<f32>, i32, i32, f32, f32, usize)>;

fn by_position(batches: &[Batch]) -> Seen {
    let mut seen = Seen::new();
    for batch in batches {
        let sample = batch.images.len() / batch.labels.len();
        for i in 0..batch.request.count {
            let pixels = batch.images[i * sample..][..sample].to_vec();
            let rest = (batch.labels[i], batch.partners[i], batch.mix[i], batch.weights[i], batch.indices[i]);
            let old = seen.insert(
                (batch.request.epoch, batch.request.first + i),
                (pixels, rest.0, rest.1, rest.2, rest.3, rest.4),
            );
            assert!(old.is_none());
        }
    }
    seen
}

#[test]
fn any_number_of_threads_gives_the_same_batches() {
    let here = load(Numbered::default(), settings(8, 0), &two_epochs(8));
    assert_eq!(here.len(), 10);
    for workers in [1, 3] {
        assert_eq!(
            load(Numbered::default(), settings(8, workers), &two_epochs(8)),
            here,
            "{workers} threads"
        );
    }
}

#[test]
fn a_position_is_the_same_sample_in_whichever_request() {
    let whole = by_position(&load(Numbered::default(), settings(8, 2), &two_epochs(8)));
    assert_eq!(whole.len(), 2 * LEN);
    // Two ranks share each batch of 8.
    let mut ranks = Vec::new();
    for rank in 0..2 {
        let shard = |request: &Request| {
            let skip = (4 * rank).min(request.count);
            Request { first: request.first + skip, count: (request.count - skip).min(4), ..*request }
        };
        let requests: Vec<Request> = two_epochs(8).iter().map(shard).collect();
        ranks.extend(load(Numbered::default(), settings(4, 1 + rank), &requests));
    }
    assert_eq!(by_position(&ranks), whole);
    // Even where a request parts a pair.
    assert_eq!(by_position(&load(Numbered::default(), settings(3, 2), &two_epochs(3))), whole);
}

#[test]
fn a_resumed_run_gets_what_it_would_have_had() {
    let all = load(Numbered::default(), settings(8, 2), &two_epochs(8));
    assert_eq!(load(Numbered::default(), settings(8, 2), &two_epochs(8)[3..]), all[3..]);
}

#[test]
fn samples_differ_between_epochs_and_pairs_share_their_mix() {
    let seen = by_position(&load(Numbered::default(), settings(8, 0), &two_epochs(8)));
    assert!((0..LEN).all(|position| seen[&(0, position)].0 != seen[&(1, position)].0));
    for pair in 0..LEN / 2 {
        let (one, other) = (&seen[&(0, 2 * pair)], &seen[&(0, 2 * pair + 1)]);
        assert_eq!((one.1, one.2, one.3), (other.2, other.1, other.3));
    }
    let mixed = seen.values().filter(|sample| sample.3 < 1.0).count();
    assert!(mixed > LEN, "{mixed}");
    // The last of an odd number has no partner.
    let (_, label, partner, lambda, ..) = &seen[&(0, LEN - 1)];
    assert_eq!((label, *lambda), (partner, 1.0));
}

#[test]
fn what_a_request_leaves_of_a_batch_is_padding() {
    let requests = [Request { epoch: 0, first: 0, count: 8 }, Request { epoch: 0, first: 32, count: 5 }];
    for workers in [0, 1] {
        let batches =
            load(Numbered::default(), LoaderSettings { depth: 1, ..settings(8, workers) }, &requests);
        let last = &batches[1];
        let sample = SIZE * SIZE * 3;
        assert_eq!(last.weights, [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]);
        assert!(last.images[5 * sample..].iter().all(|&x| x == 0.0));
        assert_eq!(
            (&last.labels[5..], &last.partners[5..], &last.mix[5..]),
            (&[0; 3][..], &[0; 3][..], &[1.0; 3][..])
        );
        assert!(last.images.iter().all(|x| x.is_finite()));
    }
}

#[test]
fn an_empty_request_is_an_empty_batch() {
    for workers in [0, 2] {
        let empty = Request { epoch: 0, first: LEN, count: 0 };
        let batches = load(Numbered::default(), settings(4, workers), &[empty]);
        assert_eq!(batches.len(), 1);
        assert_eq!(batches[0].weights, [0.0; 4]);
    }
}

#[test]
fn a_bad_image_is_left_out_and_reported_and_its_partner_stays_unmixed() {
    let good = load(Numbered::default(), settings(8, 0), &two_epochs(8));
    let bad = || Numbered { bad: vec![3, 11, 20], ..Numbered::default() };
    let here = load(bad(), settings(8, 0), &two_epochs(8));
    for workers in [1, 3] {
        assert_eq!(load(bad(), settings(8, workers), &two_epochs(8)), here);
    }
    let skipped: Vec<&Skipped> = here.iter().flat_map(|batch| &batch.skipped).collect();
    assert_eq!(skipped.len(), 6);
    for &Skipped { index, ref name, ref problem } in skipped {
        assert!([3, 11, 20].contains(&index));
        assert_eq!((name.clone(), problem.clone()), (format!("{index}.png"), format!("{index}.png: broken")));
    }
    let (good, here) = (by_position(&good), by_position(&here));
    for (&(epoch, position), sample) in &here {
        let partner = here.get(&(epoch, position ^ 1));
        if sample.4 == 0.0 {
            assert!(sample.0.iter().all(|&x| x == 0.0));
        } else if partner.is_some_and(|partner| partner.4 == 0.0) {
            assert_eq!((sample.2, sample.3), (sample.1, 1.0));
        } else {
            assert_eq!(*sample, good[&(epoch, position)]);
        }
    }
}

#[test]
fn without_skipping_the_first_bad_image_is_named_and_later_batches_follow() {
    let request = |first| Request { epoch: 0, first, count: 12 };
    let sampler = settings(1, 0).sampler;
    let [late, early, other] = [9, 4, 5].map(|position| sampler.index(0, position));
    for workers in [0, 1, 3, 3, 3, 3] {
        let set = Numbered { bad: vec![late, early, other], ..Numbered::default() };
        let settings = LoaderSettings { skip_bad: false, ..settings(12, workers) };
        let mut loader = loader(set, settings, vec![request(0), request(12)]);
        let error = loader.next_batch().unwrap_err().to_string();
        assert_eq!(error, format!("{early}.png: broken"));
        assert_eq!(loader.next_batch().unwrap().unwrap().weights, [1.0; 12]);
        assert_eq!(loader.next_batch(), Ok(None));
    }
}

#[test]
fn a_panic_becomes_an_error() {
    let index = settings(1, 0).sampler.index(0, 13);
    for workers in [0, 2] {
        let set = Numbered { panics: vec![index], ..Numbered::default() };
        let mut loader = loader(set, settings(8, workers), two_epochs(8)[..3].to_vec());
        assert_eq!(loader.next_batch().unwrap().unwrap().weights, [1.0; 8]);
        let error = loader.next_batch().unwrap_err().to_string();
        assert!(error.ends_with(&format!("preparing image {index}: what a decoder may do")), "{error}");
        assert_eq!(loader.next_batch().unwrap().unwrap().weights, [1.0; 8]);
    }
}

#[test]
fn requests_and_settings_that_make_no_sense_are_refused() {
    for workers in [0, 1] {
        let requests =
            [(0, 9), (30, 8), (usize::MAX, 2)].map(|(first, count)| Request { epoch: 0, first, count });
        let mut loader = loader(Numbered::default(), settings(8, workers), requests.to_vec());
        assert_eq!(loader.next_batch(), Err(DataError::BatchOverfull { indices: 9, capacity: 8 }));
        assert_eq!(loader.next_batch(), Err(DataError::RequestOutOfRange { first: 30, count: 8, len: LEN }));
        assert!(matches!(loader.next_batch(), Err(DataError::RequestOutOfRange { .. })));
        assert_eq!(loader.next_batch(), Ok(None));
    }
    let refused = |settings: LoaderSettings| {
        let loader = Loader::new(Arc::new(Numbered::default()), plain(), settings, std::iter::empty());
        loader.err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert!(refused(settings(0, 1)).starts_with("--batch-size 0: "));
    assert!(refused(LoaderSettings { depth: 0, ..settings(8, 1) }).starts_with("depth: "));
    let sampler = Sampler { len: LEN + 1, seed: 0, shuffle: false };
    assert!(refused(LoaderSettings { sampler, ..settings(8, 1) }).starts_with("sampler: "));
}

#[test]
fn an_evaluation_reads_the_whole_set_in_order() {
    let sampler = Sampler { len: LEN, seed: 0, shuffle: false };
    let settings = LoaderSettings { sampler, ..settings(10, 2) };
    let set = Arc::new(Numbered::default());
    let mut loader = Loader::new(set, plain(), settings, in_order(LEN, 10)).unwrap();
    let mut seen = Vec::new();
    while let Some(batch) = loader.next_batch().unwrap() {
        seen.extend_from_slice(&batch.indices[..batch.request.count]);
        assert_eq!(batch.labels, batch.partners);
        assert_eq!(batch.mix, [1.0; 10]);
    }
    assert!(seen.into_iter().eq(0..LEN));
}

#[test]
fn dropping_a_loader_does_not_wait_for_what_was_asked_for() {
    let pause = Duration::from_millis(20);
    let set = Arc::new(Numbered { pause, ..Numbered::default() });
    let requests = two_epochs(8).into_iter().cycle();
    let settings = LoaderSettings { depth: 50, ..settings(8, 3) };
    let mut loader = Loader::new(set.clone(), rich(), settings, requests).unwrap();
    loader.next_batch().unwrap();
    assert!(loader.waited() > 0.02);
    // 50 batches of 8 images would take three threads more than two seconds.
    let start = Instant::now();
    drop(loader);
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    assert_eq!(Arc::strong_count(&set), 1, "a thread is left");
}

#[test]
fn threads_work_ahead_across_the_border_of_epochs() {
    let (set, requests) = (Arc::new(Numbered::default()), two_epochs(8));
    let settings = LoaderSettings { depth: 10, ..settings(8, 2) };
    let mut loader = Loader::new(set.clone(), rich(), settings, requests.clone().into_iter()).unwrap();
    let start = Instant::now();
    while set.reads.load(Ordering::Relaxed) < 2 * LEN && start.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(set.reads.load(Ordering::Relaxed), 2 * LEN);
    for request in requests {
        assert_eq!(loader.next_batch().unwrap().unwrap().request, request);
    }
    assert_eq!(set.reads.load(Ordering::Relaxed), 2 * LEN);
}

/// Images of one size, as CIFAR has them.
struct Uniform {
    numbered: Numbered,
    size: (usize, usize),
    channels: usize,
    told: bool,
}

impl Dataset for Uniform {
    fn len(&self) -> usize {
        LEN
    }
    fn class_names(&self) -> &[String] {
        &self.numbered.names
    }
    fn channels(&self) -> usize {
        self.channels
    }
    fn label(&self, index: usize) -> usize {
        index
    }
    fn name(&self, index: usize) -> String {
        self.numbered.name(index)
    }
    fn size(&self) -> Option<(usize, usize)> {
        self.told.then_some(self.size)
    }
    fn read(&self, index: usize, out: &mut Sample) -> Result<(), DataError> {
        if self.numbered.bad.contains(&index) {
            return Err(DataError::file(self.name(index), "broken"));
        }
        let pixels = out.image.reset(self.size.0, self.size.1, self.channels);
        let byte = |i: usize| crate::random::key(&[index as u64, i as u64 / 5]) as u8;
        pixels.iter_mut().enumerate().for_each(|(i, out)| *out = byte(i).wrapping_add((i * i) as u8));
        Ok(())
    }
}

/// What is left to a device comes to the same, bit for bit, whatever the settings are and however a batch is cut.
#[test]
fn a_device_can_finish_what_the_host_leaves_to_it() {
    let mut stream = crate::random::Stream::new(77);
    let (mut originals, mut resized, mut mixed) = (0, 0, 0);
    for round in 0..120 {
        let mut pick = |n: u64| stream.below(n) as usize;
        let size = [1, 5, 8, 12, 17, 30][pick(6)];
        let sides = [1, 3, size, size, 13, 32];
        let channels = [1, 2, 3][pick(3)];
        let source = (sides[pick(6)], sides[pick(6)]);
        let geometry = match pick(4) {
            0 => Geometry::Resize,
            1 => Geometry::CenterCrop { resize: size + pick(5) },
            2 => Geometry::PadCrop { padding: pick(size as u64 + 1) },
            _ => Geometry::RandomResizedCrop { scale: (0.1, 1.0), ratio: (0.5, 2.0) },
        };
        let rand_augment =
            (channels != 2 && pick(4) == 0).then_some(RandAugment { ops: pick(3), magnitude: 9 });
        let alpha = [0.0, 0.8];
        let transform = Transform {
            geometry,
            flip: 0.5,
            rand_augment,
            erase: 0.5,
            mixup: alpha[pick(2)],
            cutmix: alpha[pick(2)],
            ..Transform::evaluation(
                size,
                None,
                &[0.485, 0.456, 0.406][..channels],
                &[0.229, 0.224, 0.225][..channels],
                if pick(2) == 0 { Interpolation::Bilinear } else { Interpolation::Bicubic },
            )
        };
        let bad = if pick(3) == 0 { vec![3, 11, 20] } else { vec![] };
        let whole = bad.is_empty();
        let numbered = Numbered { bad, ..Numbered::default() };
        let set = Arc::new(Uniform { numbered, size: source, channels, told: pick(4) > 0 });
        let batch = [3, 4, 7, 40][pick(4)];
        let workers = pick(2) * 2;
        let requests = || two_epochs(batch).into_iter();
        let mut host =
            Loader::new(set.clone(), transform.clone(), settings(batch, workers), requests()).unwrap();
        let finish = Arc::new(Finish::of(&transform, &*set).unwrap());
        let left = |finish: &Arc<Finish>| {
            let (transform, settings) = (transform.clone(), settings(batch, workers));
            let preparation = Preparation::Labels { transform, finish: Some(finish.clone()) };
            Loader::new(set.clone(), preparation, settings, requests()).unwrap()
        };
        let mut device = left(&finish);
        // All of the set, end to end, as it would lie on a device.
        let there = Arc::new(Finish::clone(&finish).with_resident(LEN));
        let mut resident = (whole && there.resident.is_some()).then(|| left(&there));
        let mut all = Vec::new();
        let mut sample = Sample::default();
        for index in 0..if whole { LEN } else { 0 } {
            set.read(index, &mut sample).unwrap();
            all.extend_from_slice(&sample.image.pixels);
        }
        originals += usize::from(finish.takes_originals());
        resized += usize::from(finish.taps_shape().is_some());
        mixed += usize::from(transform.mixes());
        let name = format!("round {round}: {transform:?} of {source:?}, batches of {batch}");
        while let Some(wanted) = host.next_batch().unwrap() {
            let found = device.next_batch().unwrap().unwrap();
            assert_eq!(found.pixels.len(), finish.images(batch) * finish.image_len());
            assert!(finish.apply(&found.pixels, &found.choices) == wanted.images, "{name}");
            if let Some(resident) = &mut resident {
                let found = resident.next_batch().unwrap().unwrap();
                assert!(found.pixels.is_empty());
                assert!(there.apply(&all, &found.choices) == wanted.images, "{name}, resident");
            }
            let found = Batch { images: wanted.images.clone(), ..found.clone() };
            let wanted =
                Batch { pixels: found.pixels.clone(), choices: found.choices.clone(), ..wanted.clone() };
            assert_eq!(found, wanted, "{name}");
        }
        assert_eq!(device.next_batch().unwrap(), None);
    }
    assert!(originals > 40 && resized > 30 && mixed > 40, "{originals} {resized} {mixed}");
}
