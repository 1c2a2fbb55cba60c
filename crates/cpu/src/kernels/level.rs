//! Instruction set that the kernels run on, and the macro that compiles a kernel once for each.
//!
//! One binary serves every x86-64: a kernel is written once as plain loops, LLVM vectorises that text separately
//! for each [`Level`], and the level is picked at run time. On other architectures only the baseline exists
//! (on aarch64 that is NEON with fused multiply-add).

use std::sync::atomic::{AtomicU8, Ordering};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    Baseline = 1,
    Avx2 = 2,
    Avx512 = 3,
}

/// Flag: the baseline target has a fused multiply-add; without one `mul_add` is a slow library call.
pub(crate) const BASELINE_FMA: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

/// The best level of this machine, detected on first use.
#[inline]
pub fn level() -> Level {
    static DETECTED: AtomicU8 = AtomicU8::new(0);
    #[cfg(test)]
    if let Some(forced) = forced::LEVEL.get() {
        return forced;
    }
    match DETECTED.load(Ordering::Relaxed) {
        3 => Level::Avx512,
        2 => Level::Avx2,
        1 => Level::Baseline,
        _ => {
            let level = detect();
            DETECTED.store(level as u8, Ordering::Relaxed);
            level
        }
    }
}

#[cold]
fn detect() -> Level {
    #[cfg(target_arch = "x86_64")]
    {
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq");
        match (avx2, avx512) {
            (true, true) => return Level::Avx512,
            (true, false) => return Level::Avx2,
            _ => {}
        }
    }
    Level::Baseline
}

/// Defines functions `name<T: Float>(…)` whose body is compiled once per [`Level`].
///
/// Written as `pub fn name<T, FMA>(…) { … }`; inside, `FMA` is a `const bool` that says whether fused multiply-add
/// is an instruction here. Everything the body calls must be `#[inline(always)]`, or it stays baseline code.
macro_rules! simd {
    ($(
        $(#[$attr:meta])*
        $vis:vis fn $name:ident<$T:ident, $FMA:ident>($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block
    )*) => {$(
        $(#[$attr])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name<$T: $crate::kernels::Float>($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body<$T: $crate::kernels::Float, const $FMA: bool>($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
            fn avx512<$T: $crate::kernels::Float>($($arg: $ty),*) $(-> $ret)? {
                body::<$T, true>($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2<$T: $crate::kernels::Float>($($arg: $ty),*) $(-> $ret)? {
                body::<$T, true>($($arg),*)
            }

            match $crate::kernels::level() {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `level` answers Avx512 only where the CPU reports every feature named above.
                $crate::kernels::Level::Avx512 => unsafe { avx512($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `level` answers Avx2 only where the CPU reports AVX2 and FMA.
                $crate::kernels::Level::Avx2 => unsafe { avx2($($arg),*) },
                _ => body::<$T, { $crate::kernels::level::BASELINE_FMA }>($($arg),*),
            }
        }
    )*};
}
pub(crate) use simd;

#[cfg(test)]
pub(crate) mod forced {
    use super::{Level, detect};
    use std::cell::Cell;

    thread_local! {
        pub(super) static LEVEL: Cell<Option<Level>> = const { Cell::new(None) };
    }

    /// Runs `check` once at every level this machine has; the message of a failure names the level.
    pub fn at_every_level(check: impl Fn(Level)) {
        let best = detect();
        for level in [Level::Baseline, Level::Avx2, Level::Avx512] {
            if level <= best {
                LEVEL.set(Some(level));
                check(level);
                LEVEL.set(None);
            }
        }
    }
}
