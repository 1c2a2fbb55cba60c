//! `vitesse completions` and `vitesse man`: made from the same definitions as the command line itself.

use crate::args::Cli;
use anyhow::Context;
use clap::CommandFactory;
use std::path::Path;

pub fn completions(shell: clap_complete::Shell) -> anyhow::Result<()> {
    clap_complete::generate(shell, &mut Cli::command(), "vitesse", &mut std::io::stdout());
    Ok(())
}

/// One page for the program and one for each command.
pub fn man(folder: &Path) -> anyhow::Result<()> {
    let at = || folder.display().to_string();
    std::fs::create_dir_all(folder).with_context(at)?;
    clap_mangen::generate_to(Cli::command(), folder).with_context(at)
}
