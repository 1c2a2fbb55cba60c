//! What the live page shows: fragments of HTML with figures, which the page puts in place when they change.

use super::run::Run;
use super::study::Study;
use super::{is_study, named};
use crate::report::live as drawn;
use serde_json::json;
use std::path::PathBuf;

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

    /// The page's data as it is now.
    pub fn json(&mut self) -> String {
        if is_study(&self.folder) { self.study() } else { self.run() }
    }

    fn run(&mut self) -> String {
        self.run.look();
        let run = &self.run;
        let answer = json!({
            "title": named(&self.folder),
            "about": run.about(),
            "state": run.state(),
            "share": run.share(),
            "sections": { "now": "", "figures": run.figures(), "log": run.log() },
        });
        answer.to_string()
    }

    fn study(&mut self) -> String {
        self.study.look();
        let study = &self.study;
        let answer = json!({
            "title": study.title().unwrap_or_else(|| named(&self.folder)),
            "about": study.answer(),
            "state": study.state(),
            "share": study.share(),
            "sections": { "now": study.now(), "figures": study.figures(), "log": "" },
        });
        answer.to_string()
    }
}
