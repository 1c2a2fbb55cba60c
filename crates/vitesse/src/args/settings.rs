//! Settings as arguments: built from their declarations in `config::settings`, for each command those that it takes.

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches, ValueHint};
use config::Raw;
use config::settings::value::Form;
use config::settings::{self, Setting};
use std::ffi::OsStr;

/// What was typed of the settings that a command takes.
#[derive(Clone)]
pub struct Settings<const COMMAND: settings::Command>(pub Raw);

/// Settings that a command takes.
fn taken(command: settings::Command) -> impl Iterator<Item = &'static Setting> {
    settings::all().iter().filter(move |setting| setting.about.commands & command != 0)
}

impl<const COMMAND: settings::Command> Args for Settings<COMMAND> {
    fn augment_args(command: Command) -> Command {
        command.args(taken(COMMAND).map(|setting| argument(COMMAND, setting)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<const COMMAND: settings::Command> FromArgMatches for Settings<COMMAND> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut settings = Settings(Raw::default());
        settings.update_from_arg_matches(matches)?;
        Ok(settings)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        for setting in taken(COMMAND) {
            let texts: Vec<String> = match setting.form {
                Form::Switch => matches.get_flag(setting.name).then(String::new).into_iter().collect(),
                _ => matches.get_many::<String>(setting.name).into_iter().flatten().cloned().collect(),
            };
            for text in texts {
                let refused = |why| Error::raw(clap::error::ErrorKind::ValueValidation, why);
                setting.put(&mut self.0, &text).map_err(refused)?;
            }
        }
        Ok(())
    }
}

fn argument(command: settings::Command, setting: &'static Setting) -> Arg {
    let arg = Arg::new(setting.name).long(setting.name).help(setting.help(command));
    let arg = arg.help_heading(setting.heading(command));
    let arg = match setting.about.alias {
        "" => arg,
        alias => arg.visible_alias(alias),
    };
    let arg = if setting.about.formerly.is_empty() { arg } else { arg.alias(setting.about.formerly) };
    let value = |arg: Arg| {
        let arg = arg.value_name(setting.about.value).value_parser(Parser { command, setting });
        arg.hide_possible_values(true).value_hint(hint(setting.about.value))
    };
    match setting.form {
        Form::Switch => arg.action(ArgAction::SetTrue),
        Form::One => value(arg),
        Form::Perhaps => value(arg).num_args(0..=1).default_missing_value(""),
        Form::List if setting.about.commas => value(arg).action(ArgAction::Append).value_delimiter(','),
        Form::List => value(arg).action(ArgAction::Append),
    }
}

/// Values that a shell offers, if there are any.
pub fn offered(values: Vec<&'static str>) -> Option<Box<dyn Iterator<Item = PossibleValue>>> {
    let some = !values.is_empty();
    some.then(|| {
        Box::new(values.into_iter().map(PossibleValue::new)) as Box<dyn Iterator<Item = PossibleValue>>
    })
}

/// What a shell completes a value with, by its name in help.
fn hint(name: &str) -> ValueHint {
    match name {
        name if name.contains("FILE") || name.contains("WEIGHTS") && name.contains('|') => {
            ValueHint::FilePath
        }
        name if name.contains("DIR") => ValueHint::DirPath,
        _ => ValueHint::Unknown,
    }
}

/// Accepts the text of a value that the setting accepts.
#[derive(Clone)]
struct Parser {
    command: settings::Command,
    setting: &'static Setting,
}

impl TypedValueParser for Parser {
    type Value = String;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<String, Error> {
        let Parser { command: of, setting } = self.clone();
        let check = move |text: String| setting.check(of, &text).map(|()| text);
        StringValueParser::new().try_map(check).parse_ref(command, arg, value)
    }

    /// Values for completions; they refuse nothing.
    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        offered(self.setting.offered(self.command))
    }
}
