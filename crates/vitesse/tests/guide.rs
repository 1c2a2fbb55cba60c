//! Commands of README.md and docs/guide are run as they stand, each page in a folder of its own, from top to bottom.
//!
//! In blocks marked `sh` every line is a command, in those marked `console` every line after `$ `. A block with `file=NAME` behind its
//! language is written to that file first. A comment before a block tells what its commands need: `<!-- gpu -->`, `<!-- network -->`,
//! `<!-- cluster -->` (several hosts, Slurm), `<!-- mpi -->` (a build with MPI), `<!-- setup -->` (installs vitesse, or is CI itself);
//! or that they end with an error: `<!-- fails -->`.

mod common;

use common::{Folder, VITESSE};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use testing::repository;

const MARKERS: [&str; 6] = ["gpu", "network", "cluster", "mpi", "setup", "fails"];
/// How the program is started before it is installed.
const UNINSTALLED: &str = "cargo run --release -- ";

#[derive(Debug, Default)]
struct Block {
    /// Number of its first line, from 1.
    line: usize,
    language: String,
    /// File that it is written to.
    file: Option<String>,
    markers: Vec<String>,
    text: String,
}

impl Block {
    /// Its commands, with lines that end in a backslash joined.
    fn commands(&self) -> Vec<String> {
        let joined = self.text.replace("\\\n", " ");
        let lines = joined.lines().map(str::trim_end);
        match self.language.as_str() {
            "sh" => lines.filter(|line| !line.is_empty()).map(str::to_string).collect(),
            "console" => lines.filter_map(|line| line.strip_prefix("$ ")).map(str::to_string).collect(),
            _ => vec![],
        }
    }

    fn is(&self, marker: &str) -> bool {
        self.markers.iter().any(|known| known == marker)
    }

    /// Returns whether this machine and this build can run it.
    fn can_run(&self) -> bool {
        let never = ["gpu", "network", "cluster", "setup"];
        !never.iter().any(|marker| self.is(marker)) && (cfg!(feature = "mpi") || !self.is("mpi"))
    }
}

fn blocks(text: &str) -> Vec<Block> {
    let (mut blocks, mut open, mut markers) = (vec![], None::<Block>, vec![]);
    for (number, line) in text.lines().enumerate() {
        match (&mut open, line.strip_prefix("```")) {
            (None, Some(info)) => {
                let mut words = info.split_whitespace();
                let language = words.next().unwrap_or_default().to_string();
                let file = words.find_map(|word| word.strip_prefix("file=")).map(str::to_string);
                let markers = std::mem::take(&mut markers);
                open = Some(Block { line: number + 2, language, file, markers, text: String::new() });
            }
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (Some(block), None) => block.text.extend([line, "\n"]),
            (None, None) => {
                let comment = line.strip_prefix("<!-- ").and_then(|rest| rest.strip_suffix(" -->"));
                markers =
                    comment.map(|words| words.split(' ').map(str::to_string).collect()).unwrap_or_default();
            }
        }
    }
    assert!(open.is_none(), "a block doesn't end");
    blocks
}

fn guide() -> Vec<PathBuf> {
    let pages = testing::files(&repository().join("docs/guide"), "md");
    assert!(pages.len() > 10, "{pages:?}");
    pages
}

fn read(page: &Path) -> Vec<Block> {
    blocks(&fs::read_to_string(page).unwrap())
}

/// Runs the commands of a page, in their order, up to the first that doesn't end as it should; returns how many ran, or that failure.
fn run(page: &Path) -> Result<usize, String> {
    let name = page.file_stem().unwrap().to_str().unwrap();
    let folder = Folder::new(&format!("guide-{name}"));
    let path =
        format!("{}:{}", Path::new(VITESSE).parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut count = 0;
    for block in read(page) {
        if let Some(file) = &block.file {
            fs::write(folder.0.join(file), &block.text).unwrap();
        }
        for command in block.commands().iter().filter(|_| block.can_run()) {
            let command = command.replacen(UNINSTALLED, "vitesse ", 1);
            let started = Instant::now();
            let mut bash = folder.command("bash", &["-euo", "pipefail", "-c", &command]);
            let output = bash.env("PATH", &path).output().unwrap();
            println!("{name}:{}: {command} ({:.1} s)", block.line, started.elapsed().as_secs_f64());
            if output.status.success() == block.is("fails") {
                let place = format!("{}:{}: {command}", page.display(), block.line);
                return Err(format!("{place}\n{}", common::text(&output)));
            }
            count += 1;
        }
    }
    Ok(count)
}

#[test]
fn the_readme_runs() {
    let count = run(&repository().join("README.md")).unwrap_or_else(|failure| panic!("{failure}"));
    assert!(count >= 2, "{count} commands");
}

#[test]
#[ignore = "takes minutes"]
fn the_guide_runs() {
    let (mut count, mut failures) = (0, vec![]);
    for page in guide() {
        match run(&page) {
            Ok(commands) => count += commands,
            Err(failure) => failures.push(failure),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(count > 25, "{count} commands");
}

/// Flags and values of all commands are known, also of those that can't run here.
#[test]
fn commands_of_readme_and_guide_are_known() {
    let (mut wrong, mut count) = (vec![], 0);
    for page in guide().into_iter().chain([repository().join("README.md")]) {
        for block in read(&page) {
            let strange = block.markers.iter().find(|marker| !MARKERS.contains(&marker.as_str()));
            assert_eq!(strange, None, "{}:{}", page.display(), block.line);
            for command in block.commands() {
                let command = command.replacen(UNINSTALLED, "vitesse ", 1);
                let Some((_, args)) =
                    command.split_once("vitesse ").filter(|(before, _)| !before.contains("cargo"))
                else {
                    continue;
                };
                let args = args.split([';', '|', '>', '#']).next().unwrap_or_default();
                let args = args.split(" -- ").next().unwrap_or_default();
                // What stands before --help is parsed first.
                let script = format!("exec \"$0\" {args} --help");
                let output = Command::new("bash").args(["-c", &script, VITESSE]).output().unwrap();
                if !output.status.success() {
                    wrong.push(format!(
                        "{}:{}: {command}\n{}",
                        page.display(),
                        block.line,
                        common::text(&output)
                    ));
                }
                count += 1;
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 30, "{count} commands");
}

/// What `vitesse plan` prints is the same everywhere, but for a last line where a machine is too small.
#[test]
fn plans_in_documents_are_those_of_now() {
    let (mut wrong, mut count) = (vec![], 0);
    for page in ["docs/design/zero-plans.md", "docs/guide/zero.md", "docs/guide/train.md"] {
        for block in read(&repository().join(page)).iter().filter(|block| block.language == "console") {
            let (command, shown) = block.text.split_once('\n').unwrap();
            let Some(args) = command.strip_prefix("$ vitesse plan ") else { continue };
            let output =
                Command::new("bash").args(["-c", &format!("exec \"$0\" plan {args}"), VITESSE]).output();
            let printed = common::text(&output.unwrap());
            let differs =
                shown.lines().zip(printed.lines().chain([""])).find(|(shown, printed)| shown != printed);
            if let Some((shown, printed)) = differs {
                wrong.push(format!("{page}:{}: {command}\n- {shown}\n+ {printed}", block.line));
            }
            count += 1;
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 10, "{count} plans");
}

#[test]
fn blocks_are_read() {
    let text = "<!-- gpu fails -->\n```sh\none \\\n  two # three\n```\ntext\n```console\n$ four\nfive\n```\n```toml file=a.toml\nx = 1\n```\n";
    let found = blocks(text);
    assert_eq!(found[0].commands(), ["one    two # three"]);
    assert!(found[0].is("gpu") && found[0].is("fails") && !found[0].can_run());
    assert_eq!((found[1].commands(), found[1].line, found[1].can_run()), (vec!["four".to_string()], 8, true));
    assert_eq!((found[2].file.as_deref(), found[2].text.as_str()), (Some("a.toml"), "x = 1\n"));
}
