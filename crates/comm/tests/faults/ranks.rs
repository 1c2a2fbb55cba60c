//! Ranks as children of a test.

use std::io::Read;
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use testing::Folder;

pub const SCENARIO: &str = "VITESSE_TEST_SCENARIO";
pub const FOLDER: &str = "VITESSE_TEST_FOLDER";
pub const TIMEOUT: &str = "VITESSE_TEST_TIMEOUT_MS";

/// What makes this executable a rank.
pub const AS_RANK: [&str; 5] = ["--ignored", "--exact", "rank", "--nocapture", "--test-threads=1"];

pub struct Ranks {
    children: Vec<(usize, Child)>,
    folder: Folder,
    /// Where rank 0 listens.
    pub address: String,
    pub port: u16,
}

pub struct Outcome {
    pub status: ExitStatus,
    pub said: String,
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("its number").port()
}

impl Ranks {
    pub fn new(test: &str) -> Self {
        let folder = Folder::new(&format!("processes-{test}"));
        Ranks { children: Vec::new(), folder, address: "127.0.0.1".to_string(), port: free_port() }
    }

    pub fn of(test: &str, scenario: &str, world: usize, timeout_ms: u64) -> Self {
        let mut ranks = Self::new(test);
        for rank in 0..world {
            ranks.start(scenario, rank, world, timeout_ms);
        }
        ranks
    }

    pub fn start(&mut self, scenario: &str, rank: usize, world: usize, timeout_ms: u64) {
        self.start_within(&[], scenario, rank, world, timeout_ms);
    }

    /// Starts a rank by another command, which gets it as its last arguments.
    pub fn start_within(&mut self, by: &[&str], scenario: &str, rank: usize, world: usize, timeout_ms: u64) {
        let mut command = self.command(by, scenario, timeout_ms);
        command.args(AS_RANK);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", world.to_string());
        command.env("MASTER_ADDR", &self.address).env("MASTER_PORT", self.port.to_string());
        self.add(rank, command);
    }

    /// This executable, or another command with it as its last argument.
    pub fn command(&self, by: &[&str], scenario: &str, timeout_ms: u64) -> Command {
        let me = std::env::current_exe().expect("this executable");
        let mut command = match by {
            [] => Command::new(me),
            [by, args @ ..] => {
                let mut command = Command::new(by);
                command.args(args).arg(me);
                command
            }
        };
        for (name, _) in std::env::vars().filter(|(name, _)| is_of_a_launcher(name)) {
            command.env_remove(name);
        }
        command.env(SCENARIO, scenario).env(FOLDER, &self.folder).env(TIMEOUT, timeout_ms.to_string());
        command
    }

    pub fn add(&mut self, rank: usize, mut command: Command) {
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        self.children.push((rank, command.spawn().expect("a rank starts")));
    }

    /// Waits until all ranks are in the middle of their work.
    pub fn are_working(&self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.children.iter().any(|(rank, _)| !self.folder.join(rank.to_string()).exists()) {
            assert!(Instant::now() < deadline, "the ranks don't get to work");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn signal(&self, rank: usize, signal: &str) {
        let (_, child) = self.children.iter().find(|(r, _)| *r == rank).expect("a rank that was started");
        let sent = Command::new("kill").args([signal, &child.id().to_string()]).status();
        assert!(sent.expect("kill runs").success());
    }

    /// How all ranks ended, by the order of their start.
    pub fn end_within(mut self, time: Duration) -> Vec<Outcome> {
        let deadline = Instant::now() + time;
        while self.children.iter_mut().any(|(_, child)| matches!(child.try_wait(), Ok(None))) {
            if Instant::now() > deadline {
                let left: Vec<usize> = self
                    .children
                    .iter_mut()
                    .filter_map(|(r, c)| matches!(c.try_wait(), Ok(None)).then_some(*r))
                    .collect();
                panic!("ranks {left:?} have not ended within {time:?}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let outcome = |(_, child): &mut (usize, Child)| {
            let mut said = String::new();
            child.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
            Outcome { status: child.wait().expect("its end"), said }
        };
        self.children.iter_mut().map(outcome).collect()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for (_, child) in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn is_of_a_launcher(name: &str) -> bool {
    ["OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "LOCAL_", "MASTER_"]
        .iter()
        .any(|start| name.starts_with(start))
}

/// The one line that all ranks together said, and the codes they ended with.
pub fn one_line(outcomes: &[Outcome]) -> (String, Vec<Option<i32>>) {
    let lines: Vec<&str> =
        outcomes.iter().flat_map(|o| o.said.lines()).filter(|line| line.starts_with("vitesse: ")).collect();
    assert_eq!(lines.len(), 1, "{lines:#?}");
    (lines[0].to_string(), outcomes.iter().map(|o| o.status.code()).collect())
}

pub fn assert_has(line: &str, parts: &[&str]) {
    for part in parts {
        assert!(line.contains(part), "\"{part}\" is not in: {line}");
    }
}
