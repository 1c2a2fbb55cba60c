//! `vitesse serve`: pages of the runs and studies below a folder, until a signal ends it.

use crate::args::ServeArgs;
use crate::signals::Signals;
use anyhow::bail;
use std::process::ExitCode;
use std::time::Duration;
use study::serve::{Server, Shows};

/// How often it is looked whether a signal came.
const LOOK: Duration = Duration::from_millis(100);

pub fn run(args: &ServeArgs) -> anyhow::Result<ExitCode> {
    let folder = &args.folder;
    if !folder.is_dir() {
        bail!(
            "{}: is no folder; name one that runs lie in, as --out of `vitesse train` has them",
            folder.display()
        );
    }
    let signals = Signals::catch()?;
    let shows = Shows::of(folder);
    let server = Server::start(args.address.clone(), shows);
    let server = server.map_err(|error| anyhow::anyhow!("--address {error}"))?;
    println!("{}: {}", folder.display(), server.url());
    println!("Ctrl-C ends it");
    while signals.came().is_none() {
        std::thread::sleep(LOOK);
    }
    server.stop();
    // Ending is all that it was asked for.
    Ok(ExitCode::SUCCESS)
}
