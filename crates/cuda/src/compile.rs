//! Compilation of C++ templates to machine code by NVRTC, with a cache on disk. Needs no GPU.

use crate::action::{HEADERS, Kernel, Source};
use crate::cache::{self, Hash};
use crate::error::CudaError;
use crate::libraries;
use cudarc::nvrtc::sys::{self, nvrtcResult};
use graph::run::Kernels;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

/// Target architecture as NVRTC names it: `sm_90a` for one GPU, `compute_120` for PTX that a driver finishes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arch(String);

impl Arch {
    pub fn named(name: impl Into<String>) -> Self {
        Arch(name.into())
    }

    /// Best target of this NVRTC for a GPU.
    pub fn of(capability: (u32, u32)) -> Result<Self, CudaError> {
        Ok(Self::among(&supported()?, capability))
    }

    fn among(supported: &[u32], (major, minor): (u32, u32)) -> Self {
        let number = 10 * major + minor;
        if supported.contains(&number) {
            // Hopper's own instructions are no part of the family's.
            return Arch(format!("sm_{number}{}", if number == 90 { "a" } else { "" }));
        }
        let newest = supported.iter().filter(|n| **n <= number).max();
        Arch(format!("compute_{}", newest.unwrap_or(&number)))
    }

    fn is_virtual(&self) -> bool {
        self.0.starts_with("compute_")
    }
}

/// A compiled source.
#[derive(Clone, Debug, PartialEq)]
pub struct Image {
    /// A cubin, or PTX that ends in a zero.
    pub code: Vec<u8>,
    /// Map from a kernel's expression to its mangled name.
    pub names: BTreeMap<String, String>,
}

/// Version of the loaded NVRTC. It must be installed.
pub fn nvrtc_version() -> Result<(i32, i32), CudaError> {
    libraries::nvrtc_present()?;
    let (mut major, mut minor): (c_int, c_int) = (0, 0);
    // SAFETY: writes two numbers.
    match unsafe { sys::nvrtcVersion(&mut major, &mut minor) } {
        nvrtcResult::NVRTC_SUCCESS => Ok((major, minor)),
        other => Err(CudaError::Misuse(format!("asking for NVRTC's version: {other:?}"))),
    }
}

/// Architectures that NVRTC knows: 75, 80, …
pub fn supported() -> Result<Vec<u32>, CudaError> {
    libraries::nvrtc_present()?;
    let mut count: c_int = 0;
    // SAFETY: writes one number.
    let counted = unsafe { sys::nvrtcGetNumSupportedArchs(&mut count) };
    let mut list: Vec<c_int> = vec![0; count.max(0) as usize];
    // SAFETY: writes as many numbers as it said there are.
    let listed = unsafe { sys::nvrtcGetSupportedArchs(list.as_mut_ptr()) };
    if (counted, listed) != (nvrtcResult::NVRTC_SUCCESS, nvrtcResult::NVRTC_SUCCESS) {
        return Err(CudaError::Misuse(format!("asking NVRTC what it compiles for: {listed:?}")));
    }
    Ok(list.into_iter().map(|n| n as u32).collect())
}

/// Compiles all kernels on all cores.
pub fn compile_all(kernels: &BTreeSet<Kernel>, arch: &Arch) -> Result<Vec<(Source, Image)>, CudaError> {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    Ok(Compiling::start(kernels, arch, threads)?.finish()?.images)
}

type CompiledSources = Vec<(Source, Image)>;

/// Result of compiling.
pub struct Compiled {
    pub images: CompiledSources,
    /// Numbers of units that NVRTC compiled, and of those found on disk.
    pub made: usize,
    pub found: usize,
    /// Seconds from the start to the end of the last unit.
    pub seconds: f64,
}

impl Compiled {
    pub fn kernels(&self) -> Kernels {
        Kernels { compiled: self.made, found: self.found, seconds: self.seconds }
    }
}

/// Kernels that are being compiled on threads of their own, while their owner does something else.
pub struct Compiling {
    work: Arc<CompileQueue>,
    threads: Vec<JoinHandle<Result<CompiledSources, CudaError>>>,
}

struct CompileQueue {
    jobs: Vec<(Source, Vec<String>)>,
    arch: Arch,
    next: AtomicUsize,
    made: AtomicUsize,
    began: Instant,
    /// End of the last unit, in nanoseconds since the start.
    ended: AtomicU64,
}

impl CompileQueue {
    fn go(&self) -> Result<CompiledSources, CudaError> {
        let mut images = Vec::new();
        while let Some((source, names)) = self.jobs.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            let (image, found) = compile_or_find(*source, names, &self.arch)?;
            self.made.fetch_add(usize::from(!found), Ordering::Relaxed);
            self.ended.fetch_max(self.began.elapsed().as_nanos() as u64, Ordering::Relaxed);
            images.push((*source, image));
        }
        Ok(images)
    }
}

impl Compiling {
    pub fn start(kernels: &BTreeSet<Kernel>, arch: &Arch, threads: usize) -> Result<Self, CudaError> {
        let (jobs, arch) = (jobs(kernels), arch.clone());
        let (next, made, ended) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicU64::new(0));
        let count = threads.clamp(1, jobs.len().max(1));
        let work = Arc::new(CompileQueue { jobs, arch, next, made, began: Instant::now(), ended });
        let mut compiling = Compiling { work, threads: Vec::with_capacity(count) };
        for _ in 0..count {
            let work = Arc::clone(&compiling.work);
            let thread = std::thread::Builder::new().name("vitesse-nvrtc".into()).spawn(move || work.go());
            let refused = |error| CudaError::Misuse(format!("no thread can be had to compile on: {error}"));
            compiling.threads.push(thread.map_err(refused)?);
        }
        Ok(compiling)
    }

    /// Waits until all is compiled.
    pub fn finish(mut self) -> Result<Compiled, CudaError> {
        let mut images = Vec::with_capacity(self.work.jobs.len());
        for thread in std::mem::take(&mut self.threads) {
            let panicked = |_| Err(CudaError::Misuse("the thread that compiles kernels panicked".into()));
            images.extend(thread.join().unwrap_or_else(panicked)?);
        }
        let made = self.work.made.load(Ordering::Relaxed);
        let seconds = self.work.ended.load(Ordering::Relaxed) as f64 / 1e9;
        Ok(Compiled { found: images.len() - made, images, made, seconds })
    }
}

impl Drop for Compiling {
    /// NVRTC must not be at work when the process ends.
    fn drop(&mut self) {
        self.work.next.store(self.work.jobs.len(), Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// Effort of one unit, in terms of [`Source::effort`].
const UNIT: usize = 100;

/// Divides kernels into units: a few instances of a source, but each of attention and of our matmuls by itself, since they take
/// seconds. The longest come first.
fn jobs(kernels: &BTreeSet<Kernel>) -> Vec<(Source, Vec<String>)> {
    let mut jobs: Vec<(Source, Vec<String>)> = Vec::new();
    for Kernel { source, name } in kernels {
        let most = UNIT / source.effort();
        match jobs.last_mut().filter(|(last, names)| last == source && names.len() < most) {
            Some((_, names)) => names.push(name.clone()),
            None => jobs.push((*source, vec![name.clone()])),
        }
    }
    jobs.sort_by_key(|(source, names)| std::cmp::Reverse(source.effort() * names.len()));
    jobs
}

/// Compiles these instances of a source's templates, or finds them on disk.
pub fn compile(source: Source, names: &[String], arch: &Arch) -> Result<Image, CudaError> {
    compile_or_find(source, names, arch).map(|(image, _)| image)
}

/// Compiles a unit; also returns whether it was found on disk.
fn compile_or_find(source: Source, names: &[String], arch: &Arch) -> Result<(Image, bool), CudaError> {
    let (major, minor) = nvrtc_version()?;
    let options = options(arch);
    let mut hash = Hash::new().add(format!("NVRTC {major}.{minor}").as_bytes()).add(source.text().as_bytes());
    for (name, text) in HEADERS {
        hash = hash.add(name.as_bytes()).add(text.as_bytes());
    }
    for part in options.iter().chain(names) {
        hash = hash.add(part.as_bytes());
    }
    let file = format!("{}-{}.kernels", source.file(), hash.text());
    let _alone = cache::alone(&file);
    if let Some(image) = cache::read(&file).and_then(|bytes| unpack(&bytes, names)) {
        return Ok((image, true));
    }
    let image = compile_text(source.file(), source.text(), names, arch, &options)?;
    cache::write(&file, &pack(&image));
    Ok((image, false))
}

fn options(arch: &Arch) -> Vec<String> {
    // Functions without annotations, lambdas among them, are the device's.
    vec![format!("--gpu-architecture={}", arch.0), "--std=c++17".into(), "-default-device".into()]
}

#[derive(Serialize, Deserialize)]
struct Head {
    names: BTreeMap<String, String>,
    bytes: usize,
    hash: String,
}

/// Packs a compiled source as a line of JSON and the code.
fn pack(image: &Image) -> Vec<u8> {
    let hash = Hash::new().add(&image.code).text();
    let head = Head { names: image.names.clone(), bytes: image.code.len(), hash };
    let mut file = serde_json::to_vec(&head).unwrap_or_default();
    file.push(b'\n');
    file.extend_from_slice(&image.code);
    file
}

/// Unpacks a file; `None` if it is truncated, changed, or of other kernels.
fn unpack(file: &[u8], names: &[String]) -> Option<Image> {
    let end = file.iter().position(|b| *b == b'\n')?;
    let head: Head = serde_json::from_slice(&file[..end]).ok()?;
    let code = file[end + 1..].to_vec();
    let whole = code.len() == head.bytes && Hash::new().add(&code).text() == head.hash;
    let complete = names.iter().all(|name| head.names.contains_key(name));
    (whole && complete).then_some(Image { code, names: head.names })
}

/// NVRTC program, freed on drop.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made once, freed once.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

impl Program {
    fn log(&self) -> String {
        let mut bytes = 0;
        // SAFETY: writes one number.
        if unsafe { sys::nvrtcGetProgramLogSize(self.0, &mut bytes) } != nvrtcResult::NVRTC_SUCCESS {
            return String::new();
        }
        let mut log = vec![0u8; bytes + 1];
        // SAFETY: writes as many bytes as it said there are.
        let _ = unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) };
        let log = log.split(|b| *b == 0).next().unwrap_or_default();
        String::from_utf8_lossy(log).trim().to_string()
    }
}

fn compile_text(
    file: &'static str,
    text: &str,
    names: &[String],
    arch: &Arch,
    options: &[String],
) -> Result<Image, CudaError> {
    let failed = |why: String, log: String| CudaError::Compile { file, arch: arch.0.clone(), why, log };
    let string =
        |text: &str| CString::new(text).map_err(|_| failed("a zero in a text".into(), String::new()));
    let strings = |list: &mut dyn Iterator<Item = &str>| list.map(string).collect::<Result<Vec<_>, _>>();
    let done = |result: nvrtcResult, doing: &str| match result {
        nvrtcResult::NVRTC_SUCCESS => Ok(()),
        other => Err(failed(format!("{doing}: {other:?}"), String::new())),
    };

    let (source, file_name) = (string(text)?, string(file)?);
    let headers = strings(&mut HEADERS.iter().map(|h| h.1))?;
    let header_names = strings(&mut HEADERS.iter().map(|h| h.0))?;
    let expressions = strings(&mut names.iter().map(String::as_str))?;
    let options = strings(&mut options.iter().map(String::as_str))?;
    let pointers = |list: &[CString]| list.iter().map(|s| s.as_ptr()).collect::<Vec<*const c_char>>();
    let (headers_at, names_at, options_at) =
        (pointers(&headers), pointers(&header_names), pointers(&options));

    let mut raw = std::ptr::null_mut();
    // SAFETY: C strings that outlive the program, in lists of the length given.
    let created = unsafe {
        let count = headers_at.len() as c_int;
        let (headers, names) = (headers_at.as_ptr(), names_at.as_ptr());
        sys::nvrtcCreateProgram(&mut raw, source.as_ptr(), file_name.as_ptr(), count, headers, names)
    };
    done(created, "making a program")?;
    let program = Program(raw);
    for (expression, name) in expressions.iter().zip(names) {
        // SAFETY: the program lives; a C string.
        let added = unsafe { sys::nvrtcAddNameExpression(program.0, expression.as_ptr()) };
        done(added, name)?;
    }
    // SAFETY: the program lives; C strings in a list of the length given.
    let compiled =
        unsafe { sys::nvrtcCompileProgram(program.0, options_at.len() as c_int, options_at.as_ptr()) };
    if compiled != nvrtcResult::NVRTC_SUCCESS {
        return Err(failed(format!("{compiled:?}"), program.log()));
    }
    let mut lowered = BTreeMap::new();
    for (expression, name) in expressions.iter().zip(names) {
        let mut found: *const c_char = std::ptr::null();
        // SAFETY: the program lives; writes the address of a string that lives as long.
        let result = unsafe { sys::nvrtcGetLoweredName(program.0, expression.as_ptr(), &mut found) };
        done(result, name)?;
        // SAFETY: as NVRTC says, a C string.
        let text = unsafe { CStr::from_ptr(found) }.to_string_lossy().into_owned();
        lowered.insert(name.clone(), text);
    }
    let mut bytes = 0;
    let virtual_code = arch.is_virtual();
    // SAFETY: writes one number.
    let sized = unsafe {
        if virtual_code {
            sys::nvrtcGetPTXSize(program.0, &mut bytes)
        } else {
            sys::nvrtcGetCUBINSize(program.0, &mut bytes)
        }
    };
    done(sized, "asking for the code's size")?;
    let mut code = vec![0u8; bytes];
    // SAFETY: writes as many bytes as it said there are.
    let copied = unsafe {
        let to = code.as_mut_ptr().cast();
        if virtual_code { sys::nvrtcGetPTX(program.0, to) } else { sys::nvrtcGetCUBIN(program.0, to) }
    };
    done(copied, "fetching the code")?;
    Ok(Image { code, names: lowered })
}

/// What a kernel does that is made to fail, in tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failing {
    Trap,
    Spin,
}

/// A kernel that fails.
pub(crate) fn failing(how: Failing, arch: &Arch) -> Result<(Kernel, (Source, Image)), CudaError> {
    let (name, file, body) = match how {
        Failing::Trap => ("trap", "trap.cu", "asm volatile(\"trap;\");"),
        Failing::Spin => ("spin", "spin.cu", "for (;;) asm volatile(\"\");"),
    };
    let text = format!("extern \"C\" __global__ void {name}() {{ {body} }}");
    let image = compile_text(file, &text, &[name.to_string()], arch, &options(arch))?;
    // The clock's is the source nearest to it: nothing else is looked for by this name.
    Ok((Kernel::new(Source::Clock, name), (Source::Clock, image)))
}

/// Compiles other texts than our sources, never cached.
#[cfg(test)]
pub(crate) fn compile_text_for_tests(text: &str, names: &[String], arch: &Arch) -> Result<Image, CudaError> {
    compile_text("test.cu", text, names, arch, &options(arch))
}

#[cfg(test)]
mod tests {
    use super::*;
    use testing::need;

    #[test]
    fn architectures_fall_back_to_the_newest_that_is_known() {
        let known = [75, 80, 90, 100];
        let named = |capability| Arch::among(&known, capability).0;
        assert_eq!(named((7, 5)), "sm_75");
        assert_eq!(named((9, 0)), "sm_90a");
        assert_eq!(named((10, 0)), "sm_100");
        assert_eq!(named((8, 9)), "compute_80");
        assert_eq!(named((12, 0)), "compute_100");
    }

    #[test]
    fn instances_of_attention_are_compiled_apart() {
        let kernel = |source, name: &str| Kernel::new(source, name);
        let (attention, rows) = (Source::Attention, Source::Rows);
        let kernels = [kernel(rows, "b"), kernel(attention, "y"), kernel(rows, "a"), kernel(attention, "x")];
        let named = |name: &str| vec![name.to_string()];
        assert_eq!(
            jobs(&kernels.into()),
            [(attention, named("x")), (attention, named("y")), (rows, vec!["a".into(), "b".into()])]
        );
        let many: BTreeSet<Kernel> = (10..21).map(|i| kernel(rows, &i.to_string())).collect();
        let units: Vec<usize> = jobs(&many).iter().map(|(_, names)| names.len()).collect();
        assert_eq!(units, [5, 5, 1]);
    }

    #[test]
    fn broken_cache_files_are_not_believed() {
        let names = vec!["f<float>".to_string()];
        let lowered = BTreeMap::from([(names[0].clone(), "_Z1f".to_string())]);
        let image = Image { code: b"\x7fELF\n code".to_vec(), names: lowered };
        let file = pack(&image);
        assert_eq!(unpack(&file, &names), Some(image));
        assert_eq!(unpack(&file[..file.len() - 1], &names), None);
        assert_eq!(unpack(b"", &names), None);
        assert_eq!(unpack(&file, &["g<float>".to_string()]), None);
        let mut changed = file.clone();
        *changed.last_mut().unwrap() ^= 1;
        assert_eq!(unpack(&changed, &names), None);
    }

    /// An error where there is no NVRTC.
    fn compiled(text: &str, names: &[&str], arch: &str) -> Result<Result<Image, CudaError>, CudaError> {
        libraries::nvrtc_present()?;
        let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        Ok(compile_text_for_tests(text, &names, &Arch::named(arch)))
    }

    #[test]
    fn templates_become_code_with_their_names() {
        let text = r#"
            #include "common.cuh"
            template <typename T, int N> __global__ void add(T* to, const T* from) {
                to[N] = from_float<T>(to_float(from[threadIdx.x]));
            }"#;
        let names = ["add<float, 4>", "add<bf16, 8>"];
        let cubin = need!(compiled(text, &names, "sm_90a")).unwrap();
        assert!(cubin.code.starts_with(b"\x7fELF"));
        assert!(cubin.names["add<bf16, 8>"].contains("bf16"), "{:?}", cubin.names);
        let ptx = compiled(text, &names, "compute_80").unwrap().unwrap();
        assert!(String::from_utf8_lossy(&ptx.code).contains(".target sm_80"));
        assert_eq!(ptx.code.last(), Some(&0));
    }

    #[test]
    fn kernels_that_fail_compile() {
        need!(libraries::nvrtc_present());
        for how in [Failing::Trap, Failing::Spin] {
            let (kernel, (_, image)) = failing(how, &Arch::named("sm_75")).unwrap();
            assert!(image.names.contains_key(&kernel.name));
        }
    }

    #[test]
    fn errors_show_the_log() {
        let result = need!(compiled("__global__ void f() { oops; }", &["f"], "sm_80"));
        let text = result.unwrap_err().to_string();
        assert!(text.contains("test.cu") && text.contains("oops"), "{text}");
    }
}
