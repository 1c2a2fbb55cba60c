//! Signals that ask a run to end: it finishes its step, saves, and says how to go on.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// SIGUSR1 is what batch systems send some time before they kill, SIGHUP what a closed terminal sends.
const CAUGHT: [(i32, &str); 4] =
    [(SIGINT, "Ctrl-C"), (SIGTERM, "SIGTERM"), (SIGUSR1, "SIGUSR1"), (SIGHUP, "SIGHUP")];

/// Signals that ask for an end. One of `nohup` is no such: whoever started this wants it to go on.
pub fn asking() -> impl Iterator<Item = i32> {
    CAUGHT.iter().map(|(signal, _)| *signal).filter(|signal| *signal != SIGHUP || !is_ignored(SIGHUP))
}

/// Returns whether a signal asks a run to end, by its number.
pub fn asks(signal: i32) -> bool {
    CAUGHT.iter().any(|(caught, _)| *caught == signal)
}

fn is_ignored(signal: i32) -> bool {
    // SAFETY: asks what a signal does into a place of the right type, and changes nothing.
    unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut now) == 0 && now.sa_sigaction == libc::SIG_IGN
    }
}

pub struct Signals {
    /// The number of the signal that came last, or 0.
    came: Arc<AtomicUsize>,
    /// The first one that the run took notice of, or 0: a launcher may send others while the run saves.
    noticed: AtomicUsize,
}

impl Signals {
    pub fn catch() -> std::io::Result<Self> {
        let came = Arc::new(AtomicUsize::new(0));
        // A second Ctrl-C doesn't wait for the step.
        let again = Arc::new(AtomicBool::new(false));
        flag::register_conditional_shutdown(SIGINT, 128 + SIGINT, Arc::clone(&again))?;
        flag::register(SIGINT, again)?;
        for signal in asking() {
            flag::register_usize(signal, Arc::clone(&came), signal as usize)?;
        }
        Ok(Signals { came, noticed: AtomicUsize::new(0) })
    }

    /// The name of the signal that ends the run.
    pub fn came(&self) -> Option<&'static str> {
        let number = self.notice();
        CAUGHT.iter().find(|(signal, _)| *signal as usize == number).map(|(_, name)| *name)
    }

    pub fn exit_code(&self) -> u8 {
        128 + self.notice() as u8
    }

    fn notice(&self) -> usize {
        let came = self.came.load(Ordering::Relaxed);
        match self.noticed.compare_exchange(0, came, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => came,
            Err(before) => before,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signal_that_ends_a_run_stays_while_others_come() {
        let signals = Signals { came: Arc::default(), noticed: AtomicUsize::new(0) };
        let send = |signal: i32| signals.came.store(signal as usize, Ordering::Relaxed);
        assert_eq!(signals.came(), None);
        send(SIGUSR1);
        assert_eq!(signals.came(), Some("SIGUSR1"));
        send(SIGTERM);
        assert_eq!(signals.came(), Some("SIGUSR1"));
        assert_eq!(signals.exit_code(), 128 + SIGUSR1 as u8);
    }
}
