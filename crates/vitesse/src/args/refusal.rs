//! What is wrong with a command line, in one line that names the flag, as settings are refused everywhere else.

use super::{Cli, familiar};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory, Error};
use std::error::Error as _;
use std::ffi::OsString;
use text::nearest;

/// The line for an error of the parser; none for what is no error: help and versions.
pub fn line(error: &Error, words: &[OsString]) -> Option<String> {
    let get = |kind| error.get(kind);
    let text = |kind| match get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        Some(ContextValue::Strings(texts)) => Some(texts.join(", ")),
        _ => None,
    };
    let mut cli = Cli::command();
    cli.build();
    let (command, path) = of(&cli, words);
    let arg = || flag(&text(ContextKind::InvalidArg).unwrap_or_default());
    let value = text(ContextKind::InvalidValue).unwrap_or_default();
    let valid = || text(ContextKind::ValidValue).filter(|words| !words.is_empty());
    Some(match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => return None,
        ErrorKind::UnknownArgument => {
            unknown(&cli, command, &path, &text(ContextKind::InvalidArg).unwrap_or_default())
        }
        ErrorKind::InvalidSubcommand => {
            let name = text(ContextKind::InvalidSubcommand).unwrap_or_default();
            let meant = nearest(&name, command.get_subcommands().map(Command::get_name));
            let hint =
                meant.map_or(format!("`{path} --help` lists all"), |meant| format!("did you mean {meant}?"));
            format!("{name}: there is no such command; {hint}")
        }
        ErrorKind::MissingSubcommand => {
            format!("{path}: a command is missing; `{path} --help` lists them")
        }
        ErrorKind::InvalidValue if value.is_empty() => match valid() {
            Some(words) => format!("{}: a value is missing: one of {words}", arg()),
            None => format!("{}: a value is missing", text(ContextKind::InvalidArg).unwrap_or_default()),
        },
        ErrorKind::InvalidValue => match valid() {
            Some(words) => format!("{} {value}: is none of {words}", arg()),
            None => format!("{} {value}: is no value of it", arg()),
        },
        ErrorKind::ValueValidation => {
            let why =
                error.source().map_or_else(|| error.kind().to_string(), |why| plainly(&why.to_string()));
            match text(ContextKind::InvalidArg) {
                Some(_) => format!("{} {value}: {why}", arg()),
                None => first_line(error),
            }
        }
        ErrorKind::MissingRequiredArgument => {
            format!(
                "{path}: {} is missing; `{path} --help` has examples",
                text(ContextKind::InvalidArg).unwrap_or_default()
            )
        }
        ErrorKind::ArgumentConflict => match text(ContextKind::PriorArg).map(|other| flag(&other)) {
            Some(other) if other == arg() => format!("{other}: is given twice"),
            Some(other) => format!("{}: can't be used with {other}", arg()),
            None => first_line(error),
        },
        _ => first_line(error),
    })
}

/// The command that words are for, and what was typed to get there.
fn of<'a>(cli: &'a Command, words: &[OsString]) -> (&'a Command, String) {
    let (mut command, mut path) = (cli, "vitesse".to_string());
    for word in words.iter().skip(1) {
        let Some(below) = command.find_subcommand(word) else { break };
        (command, path) = (below, format!("{path} {}", word.display()));
    }
    (command, path)
}

/// An argument without its value's name: `--lr <LR>` → `--lr`.
fn flag(shown: &str) -> String {
    let name = shown.split([' ', '=']).next().unwrap_or(shown);
    if name.starts_with('-') {
        name.to_string()
    } else {
        shown.trim_matches(['<', '>', '[', ']', '.']).to_string()
    }
}

/// A flag that a command doesn't have: what does the same here, another form of its name, a command that has it, or the nearest
/// spelling.
fn unknown(cli: &Command, command: &Command, path: &str, typed: &str) -> String {
    let long = typed.starts_with("--");
    let name = typed.trim_start_matches('-').split('=').next().unwrap_or_default().replace('_', "-");
    if !typed.starts_with('-') {
        return format!("{typed}: `{path}` takes no such argument; `{path} --help` says what it takes");
    }
    let flags = flags_of(command);
    let has = |name: &str| flags.contains(&name);
    let meant = nearest(&name, flags.iter().copied());
    let form = meant.filter(|meant| one_word(&name, meant));
    let hint = if has(&name) {
        if long { format!("flags have dashes: --{name}") } else { format!("flags have two dashes: --{name}") }
    } else if let Some(hint) = familiar::hint(&name, has) {
        hint
    } else if let Some(form) = form {
        format!("did you mean --{form}?")
    } else if let Some(other) = cli.get_subcommands().find(|other| flags_of(other).contains(&name.as_str())) {
        format!("`vitesse {}` has it", other.get_name())
    } else if let Some(meant) = meant {
        format!("did you mean --{meant}?")
    } else {
        format!("`{path} --help` lists all")
    };
    format!("{typed}: there is no such flag; {hint}")
}

/// Two forms of a word, as batch-size and batch-sizes or accumulate and accumulation: they begin with the same three quarters of the
/// longer.
fn one_word(a: &str, b: &str) -> bool {
    let same = a.chars().zip(b.chars()).take_while(|(x, y)| x == y).count();
    4 * same >= 3 * a.chars().count().max(b.chars().count())
}

/// Long names of the flags of a command.
fn flags_of(command: &Command) -> Vec<&str> {
    let shown = command.get_arguments().filter(|arg| !arg.is_hide_set());
    shown.flat_map(|arg| arg.get_long_and_visible_aliases().unwrap_or_default()).collect()
}

/// What the standard library says of numbers, in the words of settings.
fn plainly(why: &str) -> String {
    match why {
        "invalid float literal" | "cannot parse float from empty string" => "is no number",
        "invalid digit found in string" | "cannot parse integer from empty string" => {
            "is no whole number of 0 or more"
        }
        "number too large to fit in target type" => "is more than can be counted",
        why => why,
    }
    .to_string()
}

fn first_line(error: &Error) -> String {
    let text = error.render().to_string();
    let first = text.lines().next().unwrap_or_default();
    first.strip_prefix("error: ").unwrap_or(first).to_string()
}
