//! What tests of the whole program share.
#![allow(dead_code)]

pub mod launched;

use data::segment::overlay::save_mask;
use data::segment::{SyntheticMasks, SyntheticMasksSpec};
use data::{Dataset, Sample, Split};
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

pub const VITESSE: &str = env!("CARGO_BIN_EXE_vitesse");

/// Temporary folder in which a test runs the program.
pub struct Folder(pub testing::Folder);

impl Folder {
    pub fn new(name: &str) -> Self {
        Folder(testing::Folder::within(Path::new(env!("CARGO_TARGET_TMPDIR")), name))
    }

    pub fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(args).current_dir(&self.0).stdout(Stdio::piped()).stderr(Stdio::piped());
        // mpirun wants to hear twice that root may use it.
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        command
    }

    pub fn start(&self, args: &[&str]) -> Child {
        self.command(VITESSE, args).spawn().unwrap()
    }

    /// Runs vitesse to its end, which must be good.
    pub fn run(&self, args: &[&str]) -> Output {
        let output = self.start(args).wait_with_output().unwrap();
        assert!(output.status.success(), "{}: {}", args.join(" "), text(&output));
        output
    }

    pub fn losses(&self, run: &str) -> Vec<f64> {
        losses(&self.0.join(run))
    }
}

impl Folder {
    /// The step after which the last checkpoint of the run in `run` was made, if there is one. Looks at names only, as the run may
    /// be writing the next.
    pub fn last_step(&self) -> Option<u64> {
        let files = fs::read_dir(self.0.join("run/checkpoints")).ok()?;
        let names = files.filter_map(|file| Some(file.ok()?.file_name().to_string_lossy().into_owned()));
        names.filter_map(|name| name.strip_prefix("step-")?.strip_suffix(".safetensors")?.parse().ok()).max()
    }

    pub fn wait_for_step(&self, step: u64) {
        let deadline = Instant::now() + Duration::from_secs(90);
        while self.last_step().is_none_or(|last| last < step) {
            assert!(Instant::now() < deadline, "no checkpoint of step {step} in time");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Starts a run in `run`, and asks it to stop when it has saved `step`. Returns what it printed.
    pub fn stopped_after(&self, step: u64, args: &[&str]) -> String {
        let child = self.start(args);
        self.wait_for_step(step);
        // SAFETY: a signal to a process this test started.
        unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(128 + libc::SIGTERM), "{}", text(&output));
        text(&output)
    }

    /// A rank alone can go on from the last checkpoint.
    pub fn can_go_on(&self) {
        let last = self.last_step().expect("a whole checkpoint");
        let text = self.stopped_after(last + 1, &["train", "--resume", "run", "--ranks", "1"]);
        assert!(text.contains(&format!("going on after step {last}")), "{text}");
    }
}

pub fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// The training losses of a run, step by step.
pub fn losses(run: &Path) -> Vec<f64> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.filter_map(|line| line["loss"].as_f64()).collect()
}

/// Of numbers that should be alike: the largest difference, relative to the second.
pub fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs() / b.abs()).fold(0.0, f64::max)
}

/// Returns whether a column or key holds a measured time, or what follows from times.
pub fn is_time(name: &str) -> bool {
    name.contains("second") || name.ends_with("_rank")
}

/// Pairs of so many pixels in `set`, for training and validation: shapes whose colour is their class, so that little is to be learned.
pub fn scenes(folder: &Folder, (width, height): (usize, usize), lengths: [usize; 2]) {
    let parts = [("train", Split::Train), ("val", Split::Test)];
    for ((part, split), len) in parts.into_iter().zip(lengths) {
        for kind in ["images", "masks"] {
            fs::create_dir_all(folder.0.join(format!("set/{part}/{kind}"))).unwrap();
        }
        let spec = SyntheticMasksSpec { split, len, width, height, channels: 3, classes: 3, seed: 5 };
        let (set, mut pair) = (SyntheticMasks::new(spec).unwrap(), Sample::default());
        for index in 0..len {
            set.read(index, &mut pair).unwrap();
            for kind in ["images", "masks"] {
                let path = folder.0.join(format!("set/{part}/{kind}/{index}.png"));
                save_mask(&pair.mask, (width, height), &path).unwrap();
            }
        }
    }
    fs::write(folder.0.join("set/classes.txt"), "ground\ncircle\nsquare\n").unwrap();
}
