//! What `vitesse study` and `vitesse compare` take.

use super::settings::offered;
use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use comm::Backend;
use config::{PageAddress, Task, settings};
use std::ffi::OsStr;
use std::path::PathBuf;
use study::axes::{AXES, Axes, Axis, AxisValue};
use study::presets;
use study::spec::{Asked, Experiment, Launch};

#[derive(Args, Clone)]
pub struct StudyArgs {
    /// quick, strong, weak, fixed-per-rank, batch, accumulation, optimizer, precision, zero, nodes, or a file in TOML or JSON; with `plan`
    /// before it, points and an estimate of the time are printed, and nothing runs
    #[arg(value_name = "[plan] STUDY|FILE", num_args = 0..=2, required_unless_present = "resume", conflicts_with = "resume",
        value_parser = Studies, hide_possible_values = true)]
    pub what: Vec<String>,
    /// Go on with the study in this folder
    #[arg(long, value_name = "DIR")]
    pub resume: Option<PathBuf>,
    /// Folder for points/, results.json, results.csv, report.html and report.md; a study that was interrupted there goes on [default: studies/NAME]
    #[arg(long, value_name = "DIR", conflicts_with = "resume")]
    pub out: Option<PathBuf>,
    /// Run failed runs again
    #[arg(long)]
    pub retry_failed: bool,
    /// Runs of every point; from 5 on there are confidence intervals [default: 5]
    #[arg(long, value_name = "N")]
    pub repeats: Option<usize>,
    /// First steps of a run that don't count [default: 3]
    #[arg(long, value_name = "STEPS")]
    pub warmup: Option<u64>,
    /// Seed of the order in which points run [default: 0]
    #[arg(long)]
    pub seed: Option<u64>,
    /// What the study asks, for the report
    #[arg(long)]
    pub title: Option<String>,
    /// What legends call this machine [default: the host's name]
    #[arg(long, value_name = "NAME")]
    pub platform: Option<String>,
    /// Show the points that are done, and the run that goes on, on a live page; ADDR is a port, a host or both, as 9999 or localhost:8433; the
    /// study prints the URL [default: 127.0.0.1:8420]
    #[arg(long, value_name = "ADDR", num_args = 0..=1)]
    pub serve: Option<Option<PageAddress>>,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub grid: GridArgs,
    #[command(flatten)]
    pub launch: StartArgs,
    /// Options of `vitesse train` for every run
    #[arg(last = true, value_name = "TRAIN_OPTIONS")]
    pub train: Vec<String>,
}

#[derive(Args, Clone)]
#[command(next_help_heading = "Grid (lists are separated by commas)")]
pub struct GridArgs {
    /// classify or segment [default: the task of the models and the data]
    #[arg(long)]
    task: Option<Task>,
    #[command(flatten)]
    axes: AxisArgs,
    /// Device: cpu or cuda [default: cpu]
    #[arg(long, value_parser = ["cpu", "cuda"], hide_possible_values = true)]
    pub device: Option<String>,
    /// Passes over the data in a run [default: 1]
    #[arg(long, conflicts_with = "steps")]
    epochs: Option<u64>,
    /// Optimizer steps of a run, instead; for fixed-per-rank those of one rank, so that more ranks make fewer
    #[arg(long, visible_alias = "iterations")]
    steps: Option<u64>,
}

/// A flag for each axis of the grid.
#[derive(Clone, Default)]
struct AxisArgs(Axes);

impl Args for AxisArgs {
    fn augment_args(command: Command) -> Command {
        // Ranks and hosts first.
        let (first, rest): (Vec<&Axis>, Vec<&Axis>) = AXES.iter().partition(|axis| axis.option.is_none());
        let argument = |axis: &'static Axis| {
            let argument = Arg::new(axis.flag).long(axis.flag).value_name("LIST").help(axis.help);
            let argument = argument.value_delimiter(',').action(ArgAction::Append).num_args(1);
            argument.aliases(axis.alias).value_parser(AxisParser(axis)).hide_possible_values(true)
        };
        command.args(first.into_iter().chain(rest).map(argument))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// Reads a value of an axis; shells offer those of the setting that it varies.
#[derive(Clone)]
struct AxisParser(&'static Axis);

impl TypedValueParser for AxisParser {
    type Value = AxisValue;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        value: &OsStr,
    ) -> Result<AxisValue, clap::Error> {
        let axis = self.0;
        StringValueParser::new().try_map(move |text| axis.parse(&text)).parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        offered(settings::find(self.0.option?)?.offered(settings::TRAIN))
    }
}

/// Names of studies, for shells; a file may be named as well.
#[derive(Clone)]
struct Studies;

impl TypedValueParser for Studies {
    type Value = String;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        offered(std::iter::once("plan").chain(presets::NAMES).collect())
    }
}

impl FromArgMatches for AxisArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut axes = Axes::default();
        for axis in AXES {
            if let Some(values) = matches.get_many::<AxisValue>(axis.flag) {
                axes.set(axis, values.cloned().collect());
            }
        }
        Ok(AxisArgs(axes))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[derive(Args, Clone)]
#[command(next_help_heading = "How ranks are started")]
pub struct StartArgs {
    /// Allow more ranks × threads than cores; such points are marked, and left out of efficiency
    #[arg(long)]
    oversubscribe: bool,
    /// Communication backend: threads, mpi or nccl [default: threads]
    #[arg(long, value_name = "BACKEND")]
    comm: Option<Backend>,
    /// Hosts that mpirun starts ranks on
    #[arg(long, value_name = "NAMES", value_delimiter = ',', conflicts_with = "hostfile")]
    hosts: Vec<String>,
    /// A file of hosts as mpirun reads it
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,
    /// A command that starts the ranks, as 'srun -N {hosts} -n {ranks}'; also {per-host}, {hostlist}, {hostfile}, {command}
    #[arg(long, value_name = "TEMPLATE")]
    launcher: Option<String>,
}

#[derive(Args, Clone)]
pub struct CompareArgs {
    /// A study's folder, or its results.json
    pub a: PathBuf,
    /// Study to compare with it
    pub b: PathBuf,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
}

impl StudyArgs {
    /// What was typed, to be put over what the named study or file says.
    pub fn asked(self) -> Asked {
        let (grid, start) = (self.grid, self.launch);
        let common = Experiment {
            kind: None,
            task: grid.task.map(|task| task.to_string()),
            axes: grid.axes.0,
            device: grid.device,
            epochs: grid.epochs,
            steps: grid.steps,
            warmup: self.warmup,
        };
        let launch = Launch {
            comm: start.comm.map(|comm| comm.to_string()),
            hosts: start.hosts,
            hostfile: start.hostfile,
            launcher: start.launcher,
        };
        Asked {
            name: None,
            title: self.title,
            platform: self.platform,
            repeats: self.repeats,
            seed: self.seed,
            oversubscribe: start.oversubscribe,
            launch,
            train: self.train,
            common,
            experiments: vec![],
        }
    }
}
