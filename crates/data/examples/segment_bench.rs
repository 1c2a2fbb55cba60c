//! How many pairs of ADE20K one core decodes and augments in a second, and what takes how long.
//!
//!     cargo run --release -p data --example segment_bench -- ADE20K [SIZE] [THREADS]
//!
//! First part by part on one thread, then by the loader on THREADS of them. Rates are of CPU time.

use data::segment::{MaskFinish, MaskPreparer, MaskTransform, Unpaired, ade20k};
use data::{
    DataError, Dataset, Image, Loader, LoaderSettings, Preparation, Request, Sample, Sampler, Split, decode,
};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

const BATCH: usize = 8;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let root = arguments.next().ok_or("usage: segment_bench ADE20K [SIZE] [THREADS]")?;
    let size: usize = arguments.next().map_or(Ok(512), |size| size.parse())?;
    let threads: usize = arguments.next().map_or(Ok(2), |threads| threads.parse())?;
    let set = Arc::new(ade20k::open(Path::new(&root), Split::Train, Unpaired::Refused)?);
    let transform = MaskTransform::plain(size, size, &[0.485, 0.456, 0.406], &[0.229, 0.224, 0.225]);
    let transform = transform.with_crops().with_distortion();
    println!("{} pairs, cut to {size}×{size}", set.len());

    let images = (0..set.len()).map(|i| std::fs::read(set.paths(i).0)).collect::<Result<Vec<_>, _>>()?;
    let masks = (0..set.len()).map(|i| std::fs::read(set.paths(i).1)).collect::<Result<Vec<_>, _>>()?;
    let (mut image, mut labels) = (Image::default(), vec![]);
    let name = Path::new("");
    part("decode the image", set.len(), |i| decode::decode(&images[i], name, 3, &mut image))?;
    part("decode the mask", set.len(), |i| decode::decode_mask(&masks[i], name, &mut labels).map(drop))?;

    let pairs = (0..set.len().min(100)).map(|i| read(&*set, i)).collect::<Result<Vec<_>, _>>()?;
    let choose = |i: usize, transform: &MaskTransform| transform.choose(1, 0, i, &pairs[i]);
    part("choose", pairs.len(), |i| {
        std::hint::black_box(choose(i, &transform));
        Ok(())
    })?;
    let (mut pixels, mut mask) = (vec![0; size * size * 3], vec![0; size * size]);
    let plain = MaskTransform { distort: false, ..transform.clone() };
    for (what, transform) in [("resize and cut", &plain), ("the same, colours distorted", &transform)] {
        let mut preparer = MaskPreparer::new(transform.clone())?;
        let choices: Vec<_> = (0..pairs.len()).map(|i| choose(i, transform)).collect();
        part(what, pairs.len(), |i| {
            preparer.prepare(&pairs[i], &choices[i], &mut pixels, &mut mask).map(drop)
        })?;
    }
    let (finish, mut floats) = (MaskFinish::of(&transform)?, vec![0.0; size * size * 3]);
    part("normalise", pairs.len(), |_| {
        finish.apply(&pixels, [size as i32; 2], &mut floats);
        Ok(())
    })?;
    for (what, finished) in [("loader, for a GPU", false), ("loader, finished", true)] {
        load(what, set.clone(), &transform, threads, finished)?;
    }
    Ok(())
}

fn read(set: &dyn Dataset, index: usize) -> Result<Sample, DataError> {
    let mut pair = Sample::default();
    set.read(index, &mut pair).map(|()| pair)
}

fn part(
    what: &str,
    count: usize,
    mut work: impl FnMut(usize) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let before = busy_seconds();
    (0..count).try_for_each(&mut work)?;
    let each = (busy_seconds() - before) / count as f64;
    println!("{what:<30} {:6.2} ms", each * 1e3);
    Ok(())
}

fn load(
    what: &str,
    set: Arc<dyn Dataset>,
    transform: &MaskTransform,
    threads: usize,
    finished: bool,
) -> Result<(), DataError> {
    let len = set.len() / BATCH * BATCH;
    let sampler = Sampler { len: set.len(), seed: 1, shuffle: true };
    let settings = LoaderSettings { sampler, batch: BATCH, workers: threads, depth: 4, skip_bad: false };
    let requests = (0..len).step_by(BATCH).map(|first| Request { epoch: 0, first, count: BATCH });
    let (before, clock) = (busy_seconds(), Instant::now());
    let preparation = Preparation::Masks { transform: transform.clone(), finished };
    let mut loader = Loader::new(set, preparation, settings, requests)?;
    while loader.next_batch()?.is_some() {}
    let (wall, busy) = (clock.elapsed().as_secs_f64(), busy_seconds() - before);
    let (each, rate) = (busy / len as f64 * 1e3, len as f64 / busy);
    println!(
        "{what:<30} {each:6.2} ms, {rate:.0} images/s and thread; {:.0} images/s by the clock on {threads} threads",
        len as f64 / wall
    );
    Ok(())
}

/// How long all threads of this process have run, where Linux tells it: other programs on the same core then don't count.
fn busy_seconds() -> f64 {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return f64::NAN };
    let nanoseconds = |task: std::fs::DirEntry| -> Option<f64> {
        let times = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        times.split_whitespace().next()?.parse().ok()
    };
    tasks.flatten().filter_map(nanoseconds).sum::<f64>() * 1e-9
}
