//! A GPU that is opened early, on a thread of its own: loading libraries and making a context takes a good part of a second, in
//! which a plan can be compiled.

use crate::driver::Context;
use crate::libraries;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Keeps the GPU open until it is dropped. What goes wrong is told by whoever opens it next.
pub struct Warm(Option<JoinHandle<Option<Arc<Context>>>>);

/// Begins to open the GPU of the rank that has this number on its machine.
pub fn warm(local_rank: usize) -> Warm {
    let open = move || {
        let devices = libraries::devices().ok()?.len();
        Context::open(local_rank % devices).ok()
    };
    Warm(std::thread::Builder::new().name("vitesse-open".into()).spawn(open).ok())
}

impl Drop for Warm {
    fn drop(&mut self) {
        // No thread may be inside of a library when the process ends.
        drop(self.0.take().map(JoinHandle::join));
    }
}
