//! Every setting, declared once.
//!
//! `settings/table.rs` says all there is to say of a setting: its flag, type, help, default, DeepSpeed keys, which commands take it,
//! whether it may change when a run continues, and whether ranks must agree on it. From that follow [`Raw`] and its merging, the
//! arguments of the command line, the settings file, the record in `run.json`, `config explain`, and the resume check.

mod check;
pub mod command_line;
mod declare;
pub mod file;
pub mod record;
mod table;
pub mod value;

pub use table::{Plain, Raw};
use value::Form;

/// A command that takes settings, as a bit.
pub type Command = u16;

pub const TRAIN: Command = 1;
pub const PLAN: Command = 1 << 1;
pub const BENCH: Command = 1 << 2;
pub const INSPECT: Command = 1 << 3;
pub const EVAL: Command = 1 << 4;
pub const CLASSIFY: Command = 1 << 5;
pub const SEGMENT: Command = 1 << 6;
pub const EXPORT: Command = 1 << 7;
/// Commands that read weights, which say much about themselves.
pub const OF_WEIGHTS: Command = EVAL | CLASSIFY | SEGMENT | EXPORT;

/// Rule on when a setting may have another value than before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Never: it changes the arithmetic of a run.
    Never,
    /// May differ when a run continues; each rank may have its own. These members of `config.json` follow from it.
    Free(&'static [&'static str]),
    /// May differ when a run continues, on all ranks alike.
    Agreed(&'static [&'static str]),
}

/// Declaration of a setting, beside its name, type and help.
#[derive(Clone, Copy, Debug)]
pub struct About {
    /// Commands that take it.
    pub commands: Command,
    /// Name of the value in help.
    pub value: &'static str,
    /// Default in words, where it is no constant.
    pub default: &'static str,
    /// Second name of the flag.
    pub alias: &'static str,
    /// Earlier name of the flag, which help doesn't show.
    pub formerly: &'static str,
    /// Allows commas between values of a list.
    pub commas: bool,
    /// Commands that have their own heading, help and default of it.
    pub elsewhere: Option<(Command, [&'static str; 3])>,
    /// Commands that take only some of its words.
    pub only: Option<(Command, &'static [&'static str])>,
    /// Keys of a DeepSpeed file that say the same.
    pub deepspeed: &'static [&'static str],
    pub change: Change,
    /// Holds for one launch only; a continuation doesn't inherit it.
    pub once: bool,
    /// Settings that can't be given beside it.
    pub excludes: &'static [&'static str],
    /// Setting without which it would do nothing.
    pub requires: &'static str,
    /// Names from a registry, for `{}` in the help and the default.
    pub names: Option<fn() -> String>,
    /// Values that a shell offers, where any text may be typed.
    pub offers: Option<fn() -> Vec<&'static str>>,
}

impl About {
    pub const fn of(commands: Command) -> Self {
        About {
            commands,
            value: "",
            default: "",
            alias: "",
            formerly: "",
            commas: false,
            elsewhere: None,
            only: None,
            deepspeed: &[],
            change: Change::Never,
            once: false,
            excludes: &[],
            requires: "",
            names: None,
            offers: None,
        }
    }

    pub const fn value(self, value: &'static str) -> Self {
        About { value, ..self }
    }

    pub const fn default(self, default: &'static str) -> Self {
        About { default, ..self }
    }

    pub const fn alias(self, alias: &'static str) -> Self {
        About { alias, ..self }
    }

    pub const fn formerly(self, formerly: &'static str) -> Self {
        About { formerly, ..self }
    }

    pub const fn commas(self) -> Self {
        About { commas: true, ..self }
    }

    pub const fn also(self, commands: Command) -> Self {
        About { commands: self.commands | commands, ..self }
    }

    pub const fn deepspeed(self, deepspeed: &'static [&'static str]) -> Self {
        About { deepspeed, ..self }
    }

    /// May change when a run continues.
    pub const fn free(self, members: &'static [&'static str]) -> Self {
        About { change: Change::Free(members), ..self }
    }

    /// May change when a run continues, on all ranks alike.
    pub const fn agreed(self, members: &'static [&'static str]) -> Self {
        About { change: Change::Agreed(members), ..self }
    }

    pub const fn once(self) -> Self {
        About { once: true, ..self }
    }

    pub const fn excludes(self, excludes: &'static [&'static str]) -> Self {
        About { excludes, ..self }
    }

    pub const fn requires(self, requires: &'static str) -> Self {
        About { requires, ..self }
    }

    pub const fn names(self, names: fn() -> String) -> Self {
        About { names: Some(names), ..self }
    }

    /// Offers these to a shell, beside whatever else may be typed.
    pub const fn offers(self, offers: fn() -> Vec<&'static str>) -> Self {
        About { offers: Some(offers), ..self }
    }

    /// Also for these commands, under another heading and with other words.
    pub const fn elsewhere(
        self,
        commands: Command,
        heading: &'static str,
        help: &'static str,
        default: &'static str,
    ) -> Self {
        let elsewhere = Some((commands, [heading, help, default]));
        About { commands: self.commands | commands, elsewhere, ..self }
    }

    /// With these words alone, for these commands.
    pub const fn only(self, commands: Command, words: &'static [&'static str]) -> Self {
        About { only: Some((commands, words)), ..self }
    }
}

/// One setting.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Its flag, without dashes before it.
    pub name: &'static str,
    /// Its member of [`Raw`], and of [`Plain`] if it has one.
    pub field: &'static str,
    pub heading: &'static str,
    help: &'static str,
    pub form: Form,
    /// Words it can be, where they are few.
    words: &'static [&'static str],
    pub about: About,
    /// The default of a plain setting, as text.
    plain: fn() -> Option<String>,
    /// True if its resolved value is a member of [`Plain`].
    is_plain: bool,
    put: fn(&mut Raw, &str) -> Result<(), String>,
    texts: fn(&Raw) -> Vec<String>,
    take: fn(&mut Raw, &Raw),
}

/// Every setting, in the order of the table.
pub fn all() -> &'static [Setting] {
    table::SETTINGS
}

/// The setting of this name, alias or earlier name.
pub fn find(name: &str) -> Option<&'static Setting> {
    let names = |setting: &Setting| [setting.name, setting.about.alias, setting.about.formerly];
    all().iter().find(|setting| !name.is_empty() && names(setting).contains(&name))
}

impl Setting {
    /// Heading under which `command` shows it.
    pub fn heading(&self, command: Command) -> &'static str {
        match self.about.elsewhere {
            Some((commands, [heading, ..])) if commands & command != 0 => heading,
            _ => self.heading,
        }
    }

    /// Help for `command`, with the default.
    pub fn help(&self, command: Command) -> String {
        let (help, default) = match self.about.elsewhere {
            Some((commands, [_, help, default])) if commands & command != 0 => (help, default.to_string()),
            _ => (self.help, self.default()),
        };
        let text = self.named(help.trim());
        if default.is_empty() { text } else { format!("{text} [default: {default}]") }
    }

    /// Default in words; empty where there is none.
    pub fn default(&self) -> String {
        match self.about.default {
            "" => (self.plain)().unwrap_or_default(),
            words => self.named(words),
        }
    }

    /// Text with the names of a registry for `{}`.
    fn named(&self, text: &str) -> String {
        self.about.names.map_or_else(|| text.to_string(), |names| text.replace("{}", &names()))
    }

    /// Words that `command` takes, where they are few.
    pub fn words(&self, command: Command) -> &'static [&'static str] {
        match self.about.only {
            Some((commands, words)) if commands & command != 0 => words,
            _ => self.words,
        }
    }

    /// Values that a shell offers for it.
    pub fn offered(&self, command: Command) -> Vec<&'static str> {
        let words = self.words(command).iter().copied();
        words.chain(self.about.offers.into_iter().flat_map(|offers| offers())).collect()
    }

    /// Refuses a value that `command` can't take.
    pub fn check(&self, command: Command, text: &str) -> Result<(), String> {
        self.put(&mut Raw::default(), text)?;
        let words = self.words(command);
        if words.is_empty() || self.words == words || words.contains(&text) {
            return Ok(());
        }
        Err(value::none_of(text, words))
    }

    /// Reads a value as if it was typed; that of a list is added to it.
    pub fn put(&self, raw: &mut Raw, text: &str) -> Result<(), String> {
        if self.about.commas && text.contains(',') {
            return text.split(',').try_for_each(|part| (self.put)(raw, part));
        }
        (self.put)(raw, text)
    }

    /// Its values as typed; none if nothing was typed, an empty text for a switch.
    pub fn texts(&self, raw: &Raw) -> Vec<String> {
        (self.texts)(raw)
    }

    pub fn is_set(&self, raw: &Raw) -> bool {
        !self.texts(raw).is_empty()
    }

    /// Flags that give the same value again, if it was typed.
    pub fn typed(&self, raw: &Raw) -> Option<String> {
        let texts = self.texts(raw);
        let flag = |text: &String| match text.as_str() {
            "" => format!("--{}", self.name),
            text => format!("--{} {text}", self.name),
        };
        (!texts.is_empty()).then(|| texts.iter().map(flag).collect::<Vec<_>>().join(" "))
    }

    /// Returns whether its resolved value is a member of [`Plain`].
    pub fn is_plain(&self) -> bool {
        self.is_plain
    }

    /// Members of `config.json` that follow from it, by their paths.
    fn members(&self) -> Vec<String> {
        match self.about.change {
            _ if self.is_plain => vec![self.field.to_string()],
            Change::Never => vec![],
            Change::Free(members) | Change::Agreed(members) => {
                members.iter().map(|m| m.to_string()).collect()
            }
        }
    }
}

/// Members of `config.json` that may differ between a run and its continuation, as far as settings decide them.
pub(crate) fn free_members() -> Vec<String> {
    let free = all().iter().filter(|setting| setting.about.change != Change::Never);
    free.flat_map(Setting::members).collect()
}

/// Members among those that are alike on all ranks.
pub(crate) fn agreed_members() -> Vec<String> {
    let agreed = all().iter().filter(|setting| matches!(setting.about.change, Change::Agreed(_)));
    agreed.flat_map(Setting::members).collect()
}

impl Raw {
    /// These settings, and where they say nothing, those of `earlier`, as far as those outlive a launch.
    pub(crate) fn filled_from(mut self, earlier: &Raw) -> Raw {
        for setting in all().iter().filter(|setting| !setting.about.once) {
            (setting.take)(&mut self, earlier);
        }
        self
    }
}

#[cfg(test)]
mod tests;
