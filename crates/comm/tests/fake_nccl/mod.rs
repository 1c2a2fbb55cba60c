//! Builds the stand-in for NCCL, and talks to it.

use comm::nccl::{DeviceQueue, Library, Nccl, join};
use comm::{Activity, CommError, Communicator, Engine};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::Arc;

pub struct Fake {
    pub path: String,
    handle: *mut c_void,
}

// SAFETY: its functions may be called from any thread.
unsafe impl Sync for Fake {}

impl Fake {
    /// Each has a state of its own; `name` must be the test's.
    pub fn build(name: &str, flags: &[&str]) -> Self {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_nccl/fake_nccl.c");
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("libfake-{name}.so"));
        testing::tools::shared_library(&source, &path, flags);
        let path = path.to_str().unwrap().to_string();
        let name = CString::new(path.as_str()).unwrap();
        // SAFETY: loads what was just built; it does nothing by itself.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null());
        Fake { path, handle }
    }

    pub fn library(&self) -> Result<Arc<Library>, CommError> {
        Library::open(&self.path)
    }

    fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the library is never closed.
        let address = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        assert!(!address.is_null(), "{name:?}");
        address
    }

    fn count(&self, name: &CStr) -> i32 {
        // SAFETY: all functions that are asked this way are of this type.
        let ask: extern "C" fn() -> c_int = unsafe { std::mem::transmute(self.symbol(name)) };
        ask()
    }

    pub fn ids(&self) -> i32 {
        self.count(c"fake_ids")
    }

    pub fn destroyed(&self) -> i32 {
        self.count(c"fake_destroyed")
    }

    pub fn aborted(&self) -> i32 {
        self.count(c"fake_aborted")
    }

    /// Uses of groups that had ended.
    pub fn misuses(&self) -> i32 {
        self.count(c"fake_misuses")
    }

    fn text(&self, name: &CStr, rank: usize) -> String {
        // SAFETY: both functions that are asked this way are of this type; the text is the library's and stays.
        unsafe {
            let ask: extern "C" fn(c_int) -> *const c_char = std::mem::transmute(self.symbol(name));
            CStr::from_ptr(ask(rank as c_int)).to_str().unwrap().to_string()
        }
    }

    /// What a rank has called so far, on whose stream.
    pub fn log(&self, rank: usize) -> Vec<String> {
        self.text(c"fake_log", rank).lines().map(str::to_string).collect()
    }

    /// The id that a rank came with.
    pub fn id(&self, rank: usize) -> String {
        self.text(c"fake_id", rank)
    }

    /// From now on calls wait until they are aborted.
    pub fn hang(&self) {
        // SAFETY: the function's type.
        let tell: extern "C" fn(c_int) = unsafe { std::mem::transmute(self.symbol(c"fake_hang")) };
        tell(1);
    }

    /// A rank's test has failed: the other ranks shall not wait for it.
    fn give_up(&self) {
        // SAFETY: the function's type.
        let tell: extern "C" fn() = unsafe { std::mem::transmute(self.symbol(c"fake_give_up")) };
        tell();
    }

    /// From now on a function of NCCL fails.
    pub fn fail(&self, function: &CStr, code: i32) {
        // SAFETY: the function's type.
        let tell: extern "C" fn(*const c_char, c_int) =
            unsafe { std::mem::transmute(self.symbol(c"fake_fail")) };
        tell(function.as_ptr(), code);
    }

    /// Something goes wrong on a rank's device.
    pub fn break_device(&self, rank: usize, code: i32) {
        // SAFETY: the function's type.
        let tell: extern "C" fn(c_int, c_int) = unsafe { std::mem::transmute(self.symbol(c"fake_async")) };
        tell(rank as c_int, code);
    }
}

struct Guard<'a>(&'a Fake);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.give_up();
        }
    }
}

/// Joins with a stream whose address shows the rank, and scratch that stays.
pub fn join_with(
    library: Result<Arc<Library>, CommError>,
    world: &Communicator,
) -> Result<Arc<Nccl>, CommError> {
    let scratch = Box::leak(Box::new([0u64; 32])).as_mut_ptr().cast();
    let queue = DeviceQueue { stream: ((world.rank() + 1) * 0x100) as *mut c_void, scratch };
    // SAFETY: the fake only prints the stream; the scratch is never freed.
    unsafe { join(library, world, queue) }
}

/// Runs the body on a thread for each rank, with its world.
pub fn on_worlds<R: Send>(ranks: usize, body: impl Fn(&Communicator) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let body = &body;
        let start = |engine| scope.spawn(move || body(&Communicator::new(engine, Arc::new(Activity::new()))));
        let threads: Vec<_> = comm::threads::group(ranks).into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The same with the device group beside it.
pub fn on_devices<R: Send>(
    fake: &Fake,
    ranks: usize,
    body: impl Fn(Communicator, Arc<Nccl>) -> R + Sync,
) -> Vec<R> {
    on_worlds(ranks, |world| {
        let _guard = Guard(fake);
        let nccl = join_with(fake.library(), world).unwrap();
        let device = world.with_engine(Arc::clone(&nccl) as Arc<dyn Engine>);
        body(device, nccl)
    })
}
