//! Early opening of a GPU, on a thread of its own: loading libraries and making a context takes a good part of a second, in
//! which a plan can be compiled.

use crate::driver::Context;
use crate::libraries;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Keeps the GPU open until it is dropped. An error shows when the GPU is opened next.
pub struct Warm(Option<JoinHandle<Option<Arc<Context>>>>);

/// Starts opening the GPU of the rank with this local rank.
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
