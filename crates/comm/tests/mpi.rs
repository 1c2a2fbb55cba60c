//! The same suite in processes that MPI starts. The test starts `mpirun`, which starts this test's own file again.

#[cfg(not(feature = "mpi"))]
#[test]
fn mpi() {
    testing::skip!("built without the feature mpi");
}

#[cfg(feature = "mpi")]
mod support;

#[cfg(feature = "mpi")]
mod with_mpi {
    use super::support::{on_all, suite};
    use comm::mpi::Mpi;
    use comm::{Activity, CommError, Communicator, Reduction};
    use std::process::{Command, Output};
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    fn mpirun(ranks: usize, test: &str) -> Output {
        let program = std::env::current_exe().unwrap();
        Command::new("mpirun")
            .args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks.to_string()])
            .arg(program)
            .args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"])
            .output()
            .expect("mpirun must be there where the feature `mpi` is on")
    }

    fn text(output: &Output) -> String {
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
    }

    #[test]
    fn processes_do_as_threads_do() {
        for ranks in [2, 3, 4] {
            let output = mpirun(ranks, "with_mpi::one_rank");
            let text = text(&output);
            assert!(output.status.success(), "{ranks} ranks:\n{text}");
            let digests = on_all(comm::threads::group, ranks, |comm| suite::everything(&comm, 3));
            let same = text.matches(&format!("digest {:016x}.", digests[0])).count();
            assert_eq!(same, ranks, "each rank has the bits that threads have:\n{text}");
        }
    }

    #[test]
    #[ignore = "run by processes_do_as_threads_do"]
    fn one_rank() {
        let mpi = Mpi::init().unwrap();
        let comm = Communicator::new(mpi.engine(), Arc::new(Activity::new()));
        assert_eq!((mpi.rank(), mpi.size()), (comm.rank(), comm.size()));
        println!("digest {:016x}.", suite::everything(&comm, 3));
        suite::splits(&comm, 1);
        suite::interleaved(&comm, 2);
        suite::queued(&comm, 3);
        mismatch(&comm);
        slow_rank(&comm);
        comm.barrier(comm.name("end")).unwrap();
        assert!(matches!(Mpi::init().err(), Some(CommError::Misuse(_))));
    }

    /// In a part of the group, which is of no more use after it.
    fn mismatch(comm: &Communicator) {
        let part = comm.split(0, 0).unwrap();
        let (name, last) = (part.name("x"), part.size() - 1);
        let mut data = vec![0.0f32; if part.rank() == last { 10_000 } else { 3 }];
        let error = part.all_reduce(name, Reduction::Sum, &mut data).unwrap_err();
        let expected = format!(
            "rank {last} calls all_reduce (sum) of 10000 f32 for 'x' where rank 0 calls all_reduce (sum) of 3 f32 for 'x'"
        );
        assert_eq!(error.to_string(), expected);
    }

    /// Those who wait sleep most of the time.
    fn slow_rank(comm: &Communicator) {
        let name = comm.name("slow");
        comm.barrier(name).unwrap();
        if comm.rank() == 0 {
            std::thread::sleep(Duration::from_millis(300));
        }
        let before = processor_time();
        comm.barrier(name).unwrap();
        let used = processor_time() - before;
        assert!(comm.rank() == 0 || used < Duration::from_millis(150), "{used:?} of processor time to wait");
    }

    /// Of this thread, so far.
    fn processor_time() -> Duration {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: writes the time it is given.
        assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }, 0);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }

    #[test]
    fn a_rank_that_waits_for_a_dead_one_can_be_called_off() {
        let output = mpirun(2, "with_mpi::aborted_rank");
        let text = text(&output);
        assert!(text.contains("aborted in time: communication was aborted: enough"), "{text}");
    }

    #[test]
    #[ignore = "run by a_rank_that_waits_for_a_dead_one_can_be_called_off"]
    fn aborted_rank() {
        let mpi = Mpi::init().unwrap();
        let comm = Communicator::new(mpi.engine(), Arc::new(Activity::new()));
        if comm.rank() == 1 {
            // As good as dead.
            std::thread::sleep(Duration::from_secs(3));
            return;
        }
        let engine = comm.engine().clone();
        let monitor = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            engine.abort("enough");
        });
        let start = Instant::now();
        let error = comm.all_reduce(comm.name("x"), Reduction::Sum, &mut [0.0f32; 5000]).unwrap_err();
        if start.elapsed() < Duration::from_secs(1) {
            println!("aborted in time: {error}");
        }
        monitor.join().unwrap();
        // Without the end of MPI, for which rank 1 would be needed.
    }
}
