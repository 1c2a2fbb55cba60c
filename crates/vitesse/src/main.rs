//! The command line. Parses, calls `train`, and prints what comes back.

mod args;
mod bench;
mod config_command;
mod doctor;
mod evaluate;
mod plan;
mod shells;
mod table;
mod train_command;

use clap::Parser;

fn main() -> std::process::ExitCode {
    end_quietly_when_the_reader_leaves();
    let result = match args::Cli::parse().command {
        args::Command::Train(args) => train_command::run(*args),
        args::Command::Eval(args) => evaluate::run(args),
        args::Command::Plan(args) => plan::run(args),
        args::Command::Bench(args) => bench::run(args),
        args::Command::Doctor { json } => doctor::run(json),
        args::Command::Completions { shell } => shells::completions(shell),
        args::Command::Man { out } => shells::man(&out),
        args::Command::Config(args::ConfigCommand::Explain(args)) => config_command::explain(*args),
    };
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vitesse: {error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}

/// `vitesse plan --which last | head` should end like any other program, not with a panic.
fn end_quietly_when_the_reader_leaves() {
    #[cfg(unix)]
    // SAFETY: sets a signal back to its default before any thread is started.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
}
