//! `vitesse study` and `vitesse compare`.

mod facts;
mod show;

use crate::args::study::{CompareArgs, StudyArgs};
use crate::commands::train::supervise;
use crate::signals::Signals;
use anyhow::{Context, bail};
use comm::launch::environment;
use comm::{Backend, Launcher, Place};
use config::PageAddress;
use facts::Here;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;
use study::engine::{self, End};
use study::grid::{self, Planned};
use study::presets;
use study::results::{FORMAT, Platform};
use study::serve::{Server, Shows};
use study::spec::{Asked, Launch, Study};
use study::store::{self, Plan, Store};
use text::{many, nearest};
use train::machine;

const VERSION: &str = env!("CARGO_PKG_VERSION");

pub fn run(args: StudyArgs) -> anyhow::Result<ExitCode> {
    let place = Place::find(&environment).map_err(anyhow::Error::msg)?;
    if place.launcher != Launcher::Nothing {
        bail!("a study starts its ranks itself: run it without {}, and see --launcher", place.launcher);
    }
    let (json, retry, live) = (args.json, args.retry_failed, args.serve.clone());
    let store = match &args.resume {
        Some(folder) => {
            let store = Store::resume(folder, VERSION)?;
            check_launch(&store.plan.study.launch)?;
            store
        }
        None => {
            let (study, only_plan, out) = asked(args)?;
            if only_plan {
                return plan(&study, json);
            }
            let points = grid::plan(&study, &mut Here::new(false))?;
            check_launch(&study.launch)?;
            let out = std::path::absolute(out.unwrap_or_else(|| Path::new("studies").join(&study.name)))?;
            Store::open(&out, begun_now(study, points)?)?
        }
    };
    if retry {
        store.forget_failures()?;
    }
    // Answers until the study ends.
    let start = |address: Option<PageAddress>| {
        Server::start(address.unwrap_or_default(), Shows::One(store.folder.clone()))
            .map_err(|error| anyhow::anyhow!("--serve {error}"))
    };
    let server = live.map(start).transpose()?;
    if let Some(server) = &server {
        eprintln!("live page: {}", server.url());
    }
    let measured = measure(&store, json);
    if let Some(server) = server {
        server.finish();
    }
    measured
}

/// Prints the points of a study. A plan needs neither the cores nor, of a published set, the data; what running it would need is said.
fn plan(study: &Study, json: bool) -> anyhow::Result<ExitCode> {
    let mut here = Here::new(true);
    let points = grid::plan(&Study { oversubscribe: true, ..study.clone() }, &mut here)?;
    let mut needs = here.missing;
    let too_many = points.iter().filter(|point| point.oversubscribed).count();
    if too_many > 0 && !study.oversubscribe {
        let (cores, gpus) = (many(facts::cores(), "core"), many(facts::gpus().len(), "GPU"));
        needs.push(format!(
            "{} more than this machine has ({cores}, {gpus}): run the study on a larger one, or with --oversubscribe",
            if too_many == 1 { "one point needs".to_string() } else { format!("{} need", many(too_many, "point")) }
        ));
    }
    show::plan(study, &points, &needs, json);
    Ok(ExitCode::SUCCESS)
}

/// What every run would be refused for is refused once, before the study begins.
fn check_launch(launch: &Launch) -> anyhow::Result<()> {
    let hosts = launch.hostfile.is_some() || !launch.hosts.is_empty();
    let mpi = launch.comm.as_deref() == Some("mpi") || hosts;
    if mpi && launch.launcher.is_none() { supervise::may_call_mpirun() } else { Ok(()) }
}

/// The study that was typed, whether only its plan is wanted, and its folder.
fn asked(args: StudyArgs) -> anyhow::Result<(Study, bool, Option<PathBuf>)> {
    let words: Vec<&str> = args.what.iter().map(String::as_str).collect();
    let (only_plan, what) = match words[..] {
        ["plan", what] => (true, what.to_string()),
        ["plan"] => bail!("plan: of which study? Name it, or a file"),
        [what] => (false, what.to_string()),
        _ => bail!("{}: a study has one name", words.join(" ")),
    };
    let out = args.out.clone();
    let device = args.grid.device.clone();
    let optimizers: Vec<&str> = config::optimizers::ALL.iter().map(|one| one.name).collect();
    let named = presets::preset(&what, facts::cores(), device.as_deref(), &optimizers);
    let file = match named {
        Some(named) => named,
        None if Path::new(&what).exists() => Asked::read(Path::new(&what))?,
        None => {
            let meant = nearest(&what, presets::NAMES).map(|name| format!("; did you mean {name}?"));
            bail!(
                "{what}: is neither a file nor one of {}{}",
                presets::NAMES.join(", "),
                meant.unwrap_or_default()
            );
        }
    };
    let study = args.asked().over(file).study()?;
    if let Some(comm) = &study.launch.comm {
        comm.parse::<Backend>().map_err(|why| anyhow::anyhow!("comm {comm}: {why}"))?;
    }
    Ok((study, only_plan, out))
}

fn begun_now(study: Study, points: Vec<Planned>) -> anyhow::Result<Plan> {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Ok(Plan {
        format: FORMAT,
        version: VERSION.to_string(),
        started: since.as_secs(),
        folder: std::env::current_dir().context("the folder that this is run in")?,
        platform: platform(&study),
        study,
        points,
    })
}

fn platform(study: &Study) -> Platform {
    let machine = machine::here();
    Platform {
        name: study.platform.clone().unwrap_or_else(|| machine.host.clone()),
        host: machine.host,
        cpu: machine.cpu,
        cores: facts::cores(),
        gpus: facts::gpus(),
        memory_bytes: machine.memory_bytes,
    }
}

fn measure(store: &Store, json: bool) -> anyhow::Result<ExitCode> {
    let signals = Signals::catch()?;
    let program = std::env::current_exe().context("can't find this program")?;
    let mut progress = show::Progress::new(&signals, store.plan.study.repeats, json);
    let end = engine::run(store, &program, &mut progress)?;
    drop(progress);
    let folder = shortest(&store.folder);
    match end {
        End::Stopped { left } => {
            eprintln!(
                "vitesse: stopped with {} left; to go on: vitesse study --resume {}",
                many(left, "run"),
                folder.display()
            );
            Ok(ExitCode::from(signals.exit_code()))
        }
        End::GivenUp { failed, left, error } => {
            let runs = if failed == 1 {
                "the first run".to_string()
            } else {
                format!("the first {}", many(failed, "run"))
            };
            let others = match left.saturating_sub(failed) {
                0 => String::new(),
                others => format!(", and so would the other {others}"),
            };
            bail!(
                "{runs} failed{others}: {error}; all that was printed is in {}; when it is mended, to go on: \
                 vitesse study --resume {}",
                folder.join("runs").display(),
                folder.display()
            )
        }
        End::Done(results) if json => {
            println!("{}", serde_json::to_string(&*results)?);
            Ok(ended(&results))
        }
        End::Done(results) => {
            show::results(&results);
            println!("results in {}; open {}", folder.display(), folder.join("report.html").display());
            Ok(ended(&results))
        }
    }
}

/// A study that measured nothing has failed.
fn ended(results: &study::results::Results) -> ExitCode {
    let any = results.points.iter().any(|point| point.summary.is_some());
    if any { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// As seen from here.
fn shortest(path: &Path) -> PathBuf {
    let here = std::env::current_dir().unwrap_or_default();
    path.strip_prefix(here).map_or_else(|_| path.to_path_buf(), Path::to_path_buf)
}

pub fn compare(args: &CompareArgs) -> anyhow::Result<()> {
    let (a, b) = (store::read_results(&args.a)?, store::read_results(&args.b)?);
    let comparison = study::compare::compare(&a, &b)?;
    if args.json {
        println!("{}", serde_json::to_string(&comparison)?);
    } else {
        show::comparison(&comparison);
    }
    Ok(())
}
