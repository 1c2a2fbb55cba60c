//! The command line. Parses, calls `train`, and prints what comes back.

#[macro_use]
mod say;

mod args;
mod class_names;
mod commands;
mod ending;
mod images;
mod layout;
mod progress;
mod signals;
mod table;

use commands::{
    bench, classify, data, doctor, eval, explain, export, launch, models, plan, report, segment, serve,
    shells, study, train,
};
use std::ffi::OsString;
use std::process::ExitCode;

fn main() -> ExitCode {
    end_quietly_when_the_reader_leaves();
    let words: Vec<OsString> = std::env::args_os().collect();
    let cli = match args::Cli::read(&words) {
        Ok(cli) => cli,
        Err(error) => return ended(Err(error)),
    };
    let result = match cli.command {
        args::Command::Train(args) => {
            // Worth going on when nobody reads what it prints.
            if args.settings.0.out.is_some() || args.settings.0.resume.is_some() {
                say::go_on_without_listeners();
            }
            return ended(train::run(*args));
        }
        args::Command::Study(args) => return ended(study::run(*args)),
        args::Command::Compare(args) => study::compare(&args),
        args::Command::Launch(args) => launch::run(&args),
        args::Command::Eval(args) => eval::run(args),
        args::Command::Classify(args) => classify::run(args),
        args::Command::Segment(args) => segment::run(args),
        args::Command::Export(args) => export::run(args),
        args::Command::Data(args::DataCommand::Get(args)) => data::get(args),
        args::Command::Data(args::DataCommand::Make(args)) => data::make(&args),
        args::Command::Data(args::DataCommand::Inspect(args)) => data::inspect(*args),
        args::Command::Models { json } => models::run(json),
        args::Command::Plan(args) => plan::run(args),
        args::Command::Bench(args) => bench::run(args),
        args::Command::Report(args) => report::run(args),
        args::Command::Serve(args) => return ended(serve::run(&args)),
        args::Command::Doctor { json } => doctor::run(json),
        args::Command::Completions { shell } => shells::completions(shell),
        args::Command::Man { out, overwrite } => shells::man(&out, overwrite.force),
        args::Command::Config(args::ConfigCommand::Explain(args)) => explain::explain(*args),
    };
    ended(result.map(|()| ExitCode::SUCCESS))
}

/// Whatever went wrong is one line.
fn ended(result: anyhow::Result<ExitCode>) -> ExitCode {
    let unsaid = |code| say::failure().map_or(Ok(code), |failure| Err(anyhow::Error::msg(failure)));
    result.and_then(unsaid).unwrap_or_else(|error| {
        eprintln!("vitesse: {}", say::one_line(&error));
        ExitCode::FAILURE
    })
}

/// `vitesse plan --which last | head` should end like any other program, not with a panic.
fn end_quietly_when_the_reader_leaves() {
    #[cfg(unix)]
    // SAFETY: sets a signal back to its default before any thread is started.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
}
