//! What the live page shows: fragments of HTML with figures, which the page puts in place when they change.

use super::folder::{is_study, named};
use super::run::Run;
use super::study::Study;
use crate::report::live as drawn;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Duration;

pub fn page() -> String {
    drawn::page()
}

/// A folder, looked at again and again.
pub struct Live {
    folder: PathBuf,
    run: Run,
    study: Study,
}

impl Live {
    pub fn new(folder: PathBuf) -> Live {
        Live { run: Run::new(&folder), study: Study::new(&folder), folder }
    }

    /// The page's data as it is now; `listed`: there is a list to go back to.
    pub fn json(&mut self, now: Duration, listed: bool) -> String {
        let mut answer = if is_study(&self.folder) { self.study(now) } else { self.run(now) };
        answer["home"] = listed.into();
        answer.to_string()
    }

    fn run(&mut self, now: Duration) -> Value {
        self.run.look(now);
        let run = &self.run;
        json!({
            "title": named(&self.folder),
            "about": run.about(),
            "state": run.state(),
            "word": run.word(),
            "share": run.share(),
            "ended": !run.goes_on(),
            "sections": { "now": "", "figures": run.figures(), "log": run.log(), "facts": run.facts() },
        })
    }

    fn study(&mut self, now: Duration) -> Value {
        self.study.look(now);
        let study = &self.study;
        json!({
            "title": study.title().unwrap_or_else(|| named(&self.folder)),
            "about": study.answer(),
            "state": study.state(),
            "word": study.word(),
            "share": study.share(),
            "ended": study.is_done(),
            "sections": { "now": study.now(), "figures": study.figures(), "log": "", "facts": study.facts() },
        })
    }
}
