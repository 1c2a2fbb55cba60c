//! The command line. Parses, calls `train`, and prints what comes back.

#[macro_use]
mod say;

mod args;
mod bench;
mod classify;
mod config_command;
mod data_command;
mod doctor;
mod ending;
mod evaluate;
mod evaluate_pixels;
mod export;
mod judge;
mod launch_command;
mod masks_command;
mod plan;
mod progress;
mod report_command;
mod segment;
mod shells;
mod signals;
mod study_command;
mod subject;
mod supervise;
mod table;
mod train_command;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    end_quietly_when_the_reader_leaves();
    let result = match args::Cli::parse().command {
        args::Command::Train(args) => {
            // Worth going on when nobody reads what it prints.
            if args.settings.0.out.is_some() || args.settings.0.resume.is_some() {
                say::go_on_without_listeners();
            }
            return ended(train_command::run(*args));
        }
        args::Command::Study(args) => return ended(study_command::run(*args)),
        args::Command::Compare(args) => study_command::compare(&args),
        args::Command::Launch(args) => launch_command::run(&args),
        args::Command::Eval(args) => evaluate::run(args),
        args::Command::Classify(args) => classify::run(args),
        args::Command::Segment(args) => segment::run(args),
        args::Command::Export(args) => export::run(args),
        args::Command::Data(args::DataCommand::Get(args)) => data_command::get(args),
        args::Command::Data(args::DataCommand::Inspect(args)) => data_command::inspect(*args),
        args::Command::Plan(args) => plan::run(args),
        args::Command::Bench(args) => bench::run(args),
        args::Command::Report(args) => report_command::run(args),
        args::Command::Doctor { json } => doctor::run(json),
        args::Command::Completions { shell } => shells::completions(shell),
        args::Command::Man { out } => shells::man(&out),
        args::Command::Config(args::ConfigCommand::Explain(args)) => config_command::explain(*args),
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
