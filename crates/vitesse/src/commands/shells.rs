//! `vitesse completions` and `vitesse man`: made from the same definitions as the command line itself.

use crate::args::Cli;
use anyhow::Context;
use clap::CommandFactory;
use std::path::{Path, PathBuf};

pub fn completions(shell: clap_complete::Shell) -> anyhow::Result<()> {
    clap_complete::generate(shell, &mut Cli::command(), "vitesse", &mut std::io::stdout());
    Ok(())
}

/// One page for the program and one for each command.
pub fn man(folder: &Path, force: bool) -> anyhow::Result<()> {
    let at = || folder.display().to_string();
    let pages =
        pages(&Cli::command(), "vitesse").into_iter().map(|name| folder.join(name)).collect::<Vec<_>>();
    files::output::all_free(pages.iter().map(PathBuf::as_path), force).map_err(anyhow::Error::msg)?;
    std::fs::create_dir_all(folder).with_context(at)?;
    clap_mangen::generate_to(Cli::command(), folder).with_context(at)
}

/// Names of the pages of a command and of those below it.
fn pages(command: &clap::Command, name: &str) -> Vec<String> {
    let below =
        command.get_subcommands().flat_map(|below| pages(below, &format!("{name}-{}", below.get_name())));
    std::iter::once(format!("{name}.1")).chain(below).collect()
}
