//! Instruction set that the kernels run on, and the macro that compiles a kernel once for each.
//!
//! One binary serves every x86-64: a kernel is written once as plain loops, LLVM vectorises that text separately
//! for each [`Level`], and the level is picked at run time. On other architectures only the baseline exists
//! (on aarch64 that is NEON with fused multiply-add).

use crate::error::CpuError;
use std::sync::atomic::{AtomicU8, Ordering};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    Baseline = 1,
    Avx2 = 2,
    Avx512 = 3,
    /// AVX-512 (with BF16), and large f32 matmuls on AMX.
    Amx = 4,
}

const LEVELS: [Level; 4] = [Level::Baseline, Level::Avx2, Level::Avx512, Level::Amx];

/// Flag: the baseline target has a fused multiply-add; without one `mul_add` is a slow library call.
pub(crate) const BASELINE_FMA: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

/// Environment variable that names the level to use: a lower one has the numbers of another machine, and AMX has to be asked for.
const VARIABLE: &str = "VITESSE_SIMD";

/// The level in use, 0 before it was detected.
static IN_USE: AtomicU8 = AtomicU8::new(0);

/// The level that kernels run at, detected on first use: the best of this machine but for AMX, or the one that `VITESSE_SIMD`
/// names.
#[inline]
pub fn level() -> Level {
    #[cfg(test)]
    if let Some(forced) = forced::LEVEL.get() {
        return forced;
    }
    match IN_USE.load(Ordering::Relaxed) {
        4 => Level::Amx,
        3 => Level::Avx512,
        2 => Level::Avx2,
        1 => Level::Baseline,
        _ => {
            let level = best(named().ok().flatten().unwrap_or(Level::Avx512));
            IN_USE.store(level as u8, Ordering::Relaxed);
            level
        }
    }
}

/// The level that `VITESSE_SIMD` names, if it is set; what it says instead of one is the error.
fn named() -> Result<Option<Level>, String> {
    let Ok(name) = std::env::var(VARIABLE) else { return Ok(None) };
    let level = LEVELS.into_iter().find(|level| format!("{level:?}").eq_ignore_ascii_case(&name));
    level.map(Some).ok_or(name)
}

/// Checks that `VITESSE_SIMD`, if it is set, names a level that this machine has.
pub fn check_level() -> Result<(), CpuError> {
    match named().map_err(CpuError::Level)? {
        Some(level) if best(level) != level => Err(CpuError::NoLevel(format!("{level:?}").to_lowercase())),
        _ => Ok(()),
    }
}

/// Goes on at a level, or the best below it that this machine has. For benchmarks that compare levels.
pub fn limit(most: Level) {
    IN_USE.store(best(most) as u8, Ordering::Relaxed);
}

/// The best level of this machine up to `most`. The system is not asked for AMX unless it may be used.
#[cold]
pub(crate) fn best(most: Level) -> Level {
    let vectors = detect_vectors();
    if most == Level::Amx && vectors == Level::Avx512 && has_amx() { Level::Amx } else { vectors.min(most) }
}

fn detect_vectors() -> Level {
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

/// Checks whether the CPU has tiles of 16 rows of 64 bytes that multiply bf16, and asks the system for them: a process may use
/// them, and has room for them where its threads are interrupted, only after it asked.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn has_amx() -> bool {
    use std::arch::x86_64::__cpuid_count;
    const BF16_AND_TILES: u32 = 1 << 22 | 1 << 24;
    const REQUEST_PERMISSION: libc::c_int = 0x1023;
    const TILES: libc::c_int = 18;
    if !is_x86_feature_detected!("avx512bf16")
        || __cpuid_count(0, 0).eax < 0x1d
        || __cpuid_count(7, 0).edx & BF16_AND_TILES != BF16_AND_TILES
    {
        return false;
    }
    // Bytes of a row, the number of tiles, and their rows.
    let palette = __cpuid_count(0x1d, 1);
    let fits = palette.ebx & 0xffff >= 64 && palette.ebx >> 16 >= 8 && palette.ecx & 0xffff >= 16;
    // SAFETY: a system call with plain numbers; the answer says whether it was granted.
    fits && unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILES) } == 0
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn has_amx() -> bool {
    false
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
                // SAFETY: `level` answers these only where the CPU reports every feature named above.
                $crate::kernels::Level::Avx512 | $crate::kernels::Level::Amx => unsafe { avx512($($arg),*) },
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
    use super::{LEVELS, Level, best};
    use std::cell::Cell;

    thread_local! {
        pub(super) static LEVEL: Cell<Option<Level>> = const { Cell::new(None) };
    }

    /// Runs `check` once at every level this machine has; the message of a failure names the level.
    pub fn at_every_level(check: impl Fn(Level)) {
        let best = best(Level::Amx);
        for level in LEVELS {
            if level <= best {
                LEVEL.set(Some(level));
                check(level);
                LEVEL.set(None);
            }
        }
    }
}
