//! Ranks as processes, started as a launcher like torchrun starts them.

use super::Folder;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The processes of a run.
pub struct Ranks {
    pub folder: Folder,
    children: Children,
}

/// Processes that end with what holds them.
struct Children(Vec<Child>);

impl Ranks {
    /// Starts `world` ranks in `folder`, each by its own command.
    pub fn launch(folder: Folder, world: usize, command: impl Fn(usize) -> Command) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let start = |rank: usize| {
            let mut command = command(rank);
            command.current_dir(&folder.0);
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", world.to_string());
            command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", world.to_string());
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let children = Children((0..world).map(start).collect());
        Ranks { folder, children }
    }

    pub fn signal(&self, rank: usize, signal: i32) {
        // SAFETY: a signal to a process this test started.
        unsafe { libc::kill(self.pid(rank) as i32, signal) };
    }

    pub fn pid(&self, rank: usize) -> u32 {
        self.children.0[rank].id()
    }

    /// Waits for the end of all ranks but those in `except`, which must be a failure; returns everything printed.
    pub fn end_within(&mut self, limit: Duration, except: &[usize]) -> String {
        self.wait(limit, except, false)
    }

    /// Waits for the good end of all ranks; returns everything printed.
    pub fn finish_within(&mut self, limit: Duration) -> String {
        self.wait(limit, &[], true)
    }

    fn wait(&mut self, limit: Duration, except: &[usize], well: bool) -> String {
        let start = Instant::now();
        let mut text = String::new();
        let all = self.children.0.iter_mut().enumerate();
        for (rank, child) in all.filter(|(rank, _)| !except.contains(rank)) {
            let status = loop {
                if let Some(status) = child.try_wait().unwrap() {
                    break status;
                }
                assert!(start.elapsed() < limit, "rank {rank} still runs after {limit:?}: {text}");
                std::thread::sleep(Duration::from_millis(20));
            };
            if well {
                text += &std::io::read_to_string(child.stdout.take().unwrap()).unwrap();
            }
            text += &std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
            assert_eq!(status.success(), well, "rank {rank} ended with {status}: {text}");
        }
        if !well {
            println!("after {:.1} s: {text}", start.elapsed().as_secs_f64());
        }
        text
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// One line, with all these words in it.
pub fn tells(text: &str, words: &[&str]) {
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("vitesse: ")).collect();
    assert_eq!(lines.len(), 1, "one line: {text}");
    for word in words {
        assert!(lines[0].contains(word), "{word:?} in: {}", lines[0]);
    }
}
