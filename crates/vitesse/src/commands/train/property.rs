//! What resolves starts. Random command lines of `train` are run as they would be from a shell: one that is accepted makes its steps
//! and its evaluation; one that is refused names a flag and writes nothing.
//!
//! The same cases every time, as many as take some seconds; `VITESSE_PROPERTY_CASES` asks for more of them.

mod values;

use super::{Done, prepare, start, with_files};
use crate::args::{Cli, Command};
use crate::commands::train::supervise;
use crate::signals::Signals;
use clap::{CommandFactory, Parser};
use config::{Raw, Resolved};
use graph::random::Sequence;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::panic::catch_unwind;
use std::path::PathBuf;
use std::sync::Mutex;
use values::{CONFIGS, ELSEWHERE, Values, of_flags};

const CASES: u64 = 150;
const SEED: u64 = 18;

/// Runs small enough to be made; what others come to is asked of their settings alone.
const MOST_STEPS: u64 = 12;
const MOST_IMAGES: usize = 64;
const MOST_NUMBERS: f64 = 3e8;

const CLASSIFY: &[(&str, &str)] = &[("model", "vit-nano/8"), ("image-size", "16"), ("batch-size", "2")];
const SEGMENT: &[(&str, &str)] =
    &[("task", "segment"), ("model", "swinv2-nano/w2+upernet"), ("image-size", "32"), ("batch-size", "2")];
const SMALL: &[(&str, &str)] =
    &[("train-samples", "8"), ("test-samples", "3"), ("threads", "1"), ("steps", "2"), ("out", "{OUT}/run")];

struct Random(Sequence);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        ((self.0.uniform() * n as f64) as usize).min(n - 1)
    }

    fn chance(&mut self, p: f64) -> bool {
        self.0.uniform() < p
    }
}

/// A command line, flag by flag, and whether a value in it is one that no run may have.
struct Case {
    flags: BTreeMap<&'static str, Option<String>>,
    wrong: Option<&'static str>,
}

impl Case {
    fn number(number: u64, values: &[Values]) -> Case {
        let mut random = Random(Sequence::new(SEED, number as u32));
        let task = if random.chance(0.5) { CLASSIFY } else { SEGMENT };
        let base = task.iter().chain(SMALL);
        let mut flags: BTreeMap<_, _> = base.map(|(flag, value)| (*flag, Some(value.to_string()))).collect();
        let mut wrong = None;
        for _ in 0..1 + random.below(6) {
            let Values { flag, good, wrong: bad } = &values[random.below(values.len())];
            let is_wrong = good.is_empty() && !bad.is_empty()
                || wrong.is_none() && !bad.is_empty() && random.chance(0.15);
            if is_wrong {
                wrong = Some(*flag);
            } else if wrong == Some(*flag) {
                wrong = None;
            }
            let of = if is_wrong { bad } else { good };
            let value = if of.is_empty() { None } else { Some(of[random.below(of.len())].to_string()) };
            if *flag == "epochs" && random.chance(0.7) {
                flags.remove("steps");
            }
            flags.insert(flag, value);
        }
        Case { flags, wrong }
    }

    fn command(&self, folders: &Folders) -> Vec<String> {
        let [input, output] = [&folders.input, &folders.output].map(|path| path.display().to_string());
        let flag = |(flag, value): (&&str, &Option<String>)| match value {
            Some(value) => format!("--{flag}={}", value.replace("{IN}", &input).replace("{OUT}", &output)),
            None => format!("--{flag}"),
        };
        ["vitesse", "train"].map(String::from).into_iter().chain(self.flags.iter().map(flag)).collect()
    }
}

/// What cases read, and where one writes.
struct Folders {
    /// Holds the other two, and removes them.
    _all: testing::Folder,
    input: PathBuf,
    output: PathBuf,
}

impl Folders {
    fn new() -> Folders {
        let all = testing::Folder::new("property");
        let [input, output] = ["in", "out"].map(|name| all.join(name));
        fs::create_dir_all(&input).unwrap();
        for (name, text) in CONFIGS {
            fs::write(input.join(name), text).unwrap();
        }
        let folders = Folders { _all: all, input, output };
        folders.begin();
        let mut base: Vec<String> = vec!["vitesse".into(), "train".into()];
        base.extend(
            CLASSIFY
                .iter()
                .chain(SMALL)
                .filter(|(flag, _)| *flag != "out")
                .map(|(f, v)| format!("--{f}={v}")),
        );
        base.push(format!("--out={}", folders.input.join("run").display()));
        assert!(matches!(run(&base), Ran::Done(_)), "a run whose weights others start from");
        folders
    }

    /// Nothing is there before a case.
    fn begin(&self) {
        let _ = fs::remove_dir_all(&self.output);
        fs::create_dir_all(&self.output).unwrap();
    }

    fn written(&self) -> Vec<PathBuf> {
        fs::read_dir(&self.output).unwrap().map(|entry| entry.unwrap().path()).collect()
    }
}

/// What became of a command line.
enum Ran {
    Refused(String),
    /// Accepted, but it would take long, or start processes.
    Accepted,
    Done(Box<Done>),
}

fn run(words: &[String]) -> Ran {
    let args = match Cli::try_parse_from(words) {
        Ok(Cli { command: Command::Train(args) }) => with_files(args.settings.0),
        Ok(_) => panic!("{words:?} is no `train`"),
        Err(error) => return Ran::Refused(error.to_string()),
    };
    if supervise::wanted(&args) {
        return Ran::Accepted;
    }
    let world = args.ranks.unwrap_or(1);
    if world > 0 {
        match prepare(&args, world, world, None) {
            Ok((run, _)) if !is_small(&run) => return Ran::Accepted,
            Err(error) => return Ran::Refused(format!("{error:#}")),
            Ok(_) => {}
        }
    }
    train(&args)
}

fn train(args: &Raw) -> Ran {
    let (signals, told) = (Signals::catch().unwrap(), Mutex::new(String::new()));
    let tell = |line: &str| told.lock().unwrap().push_str(line);
    match start(args, &signals, &tell) {
        Err(error) => Ran::Refused(format!("{error:#}")),
        Ok(Err(ended)) => Ran::Refused(ended.line.unwrap_or_default() + &told.into_inner().unwrap()),
        Ok(Ok(done)) => Ran::Done(Box::new(done)),
    }
}

fn is_small(run: &Resolved) -> bool {
    let images = run.global_batch().max(run.data.facts.test_images);
    run.steps <= MOST_STEPS
        && images <= MOST_IMAGES
        && run.network.numbers(run.batch) * (run.steps as f64) < MOST_NUMBERS
}

/// Flags of `train` by their names.
fn names() -> BTreeSet<String> {
    let command = Cli::command();
    let train = command.find_subcommand("train").unwrap();
    train
        .get_arguments()
        .flat_map(|arg| arg.get_long_and_visible_aliases().unwrap_or_default())
        .map(String::from)
        .collect()
}

/// Returns whether a line names a flag, or a file that one named.
fn names_a_flag(line: &str, case: &Case, folders: &Folders) -> bool {
    let typed = ["config", "init", "data"].into_iter().filter_map(|flag| case.flags.get(flag)?.as_deref());
    let paths = typed.map(|value| value.split_once(':').map_or(value, |(_, path)| path));
    let mut files = paths.map(|path| path.replace("{IN}", &folders.input.display().to_string()));
    names().iter().any(|name| line.contains(&format!("--{name}"))) || files.any(|file| line.contains(&file))
}

/// What is missing of a run that ended well.
fn missing(Done { run, summary, .. }: &Done) -> Option<String> {
    let metrics = run.out.as_ref().map(|folder| fs::read_to_string(folder.join("metrics.jsonl")).unwrap());
    let metrics = metrics.unwrap_or_default();
    let lines = |column: &str| metrics.lines().filter(|line| line.contains(column)).count() as u64;
    let scored = summary.score.as_ref().is_some_and(|score| score.loss().is_finite());
    match (summary.steps, lines("\"lr\""), lines("\"eval_loss\"")) {
        (made, written, scores) if (made, written) == (run.steps, run.steps) && scores > 0 && scored => None,
        found => Some(format!("steps made, written, evaluations written: {found:?} of {}", run.steps)),
    }
}

#[test]
fn every_flag_has_values() {
    let known: BTreeSet<String> = of_flags()
        .iter()
        .map(|values| values.flag)
        .chain(ELSEWHERE.iter().map(|(flag, _)| *flag))
        .map(String::from)
        .collect();
    let missing: Vec<_> = Cli::command()
        .find_subcommand("train")
        .unwrap()
        .get_arguments()
        .filter_map(|arg| arg.get_long())
        .filter(|flag| !known.contains(*flag))
        .map(String::from)
        .collect();
    assert!(missing.is_empty(), "property/values.rs has no values of {missing:?}");
}

/// What is wrong with what became of a case.
fn fault(case: &Case, ran: &Ran, folders: &Folders) -> Option<String> {
    match ran {
        Ran::Refused(line) if !names_a_flag(line, case, folders) => Some(format!("names no flag: {line}")),
        Ran::Refused(line) if !folders.written().is_empty() => {
            Some(format!("left {:?}: {line}", folders.written()))
        }
        Ran::Refused(_) => None,
        Ran::Accepted | Ran::Done(_) if case.wrong.is_some() => {
            Some(format!("accepted a wrong {:?}", case.wrong))
        }
        Ran::Accepted => None,
        Ran::Done(done) => missing(done),
    }
}

#[test]
fn what_resolves_starts() {
    let cases = std::env::var("VITESSE_PROPERTY_CASES").map_or(CASES, |text| text.parse().unwrap());
    let (folders, values) = (Folders::new(), of_flags());
    let (mut trained, mut refused, mut faults) = (0, 0, Vec::new());
    for number in 0..cases {
        let case = Case::number(number, &values);
        let words = case.command(&folders);
        folders.begin();
        let ran = catch_unwind(|| run(&words));
        let fault = match &ran {
            Ok(ran) => fault(&case, ran, &folders),
            Err(_) => Some("panicked".to_string()),
        };
        faults.extend(fault.map(|fault| format!("case {number} {fault}\n{}", words.join(" "))));
        trained += u64::from(matches!(ran, Ok(Ran::Done(_))));
        refused += u64::from(matches!(ran, Ok(Ran::Refused(_))));
    }
    println!("{trained} of {cases} cases trained, {refused} refused");
    assert!(faults.is_empty(), "{} of {cases} cases:\n\n{}", faults.len(), faults.join("\n\n"));
    assert!(trained * 5 > cases && refused * 5 > cases, "{trained} trained, {refused} refused");
}
