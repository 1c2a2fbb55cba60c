//! Measured ceilings of the machine, which the rates of a step are compared with.

use crate::matmul::{Matrix, matmul};
use crate::pool::Pool;
use graph::Ceilings;
use std::sync::Mutex;
use std::time::Instant;

/// Elements each thread copies: 64 MiB, well beyond a core's caches.
const COPIED: usize = 16 << 20;
/// Side of the square matrices: three of them are under 2 MB.
const SIDE: usize = 384;
const MATMULS: usize = 20;

/// Ceilings of all threads together: f32 matmuls of square matrices that stay in a core's cache, and copying arrays far
/// larger than the caches. Takes well under a second; the best of three rounds each.
pub fn measure(threads: usize) -> std::io::Result<Ceilings> {
    let pool = Pool::new(threads)?;
    let flops = (threads * MATMULS) as f64 * 2.0 * (SIDE as f64).powi(3);
    let matrices = || [(); 3].map(|()| vec![0.5f32; SIDE * SIDE]);
    let cached: Vec<_> = (0..threads).map(|_| Mutex::new(matrices())).collect();
    let flops_time = best(|| {
        pool.each(threads, |piece, _| {
            if let Ok(mut own) = cached[piece].lock() {
                let [a, b, c] = own.each_mut().map(|m| Matrix::rows(m.as_mut_ptr(), SIDE));
                for _ in 0..MATMULS {
                    // SAFETY: three arrays of their own, of SIDE × SIDE elements each.
                    unsafe { matmul((SIDE, SIDE, SIDE), c, a, b, false) };
                }
            }
        });
    });
    let arrays: Vec<_> = (0..threads).map(|_| Mutex::new((vec![1f32; COPIED], vec![0f32; COPIED]))).collect();
    let bytes_time = best(|| {
        pool.each(threads, |piece, _| {
            if let Ok(mut pair) = arrays[piece].lock() {
                let (from, to) = &mut *pair;
                to.copy_from_slice(std::hint::black_box(from));
                std::hint::black_box(to);
            }
        });
    });
    let bytes = (threads * 2 * COPIED * size_of::<f32>()) as f64;
    Ok(Ceilings { flops: flops / flops_time, bytes: bytes / bytes_time })
}

fn best(mut task: impl FnMut()) -> f64 {
    let once = |task: &mut dyn FnMut()| {
        let start = Instant::now();
        task();
        start.elapsed().as_secs_f64()
    };
    task();
    (0..3).map(|_| once(&mut task)).fold(f64::INFINITY, f64::min)
}
