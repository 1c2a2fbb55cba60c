//! How a run is: going on, ended, or gone, as its folder tells.

use crate::report::live::seconds;
use records::{Ended, Ending, Holder};
use std::path::Path;
use std::time::Duration;

/// A holder elsewhere whose lock is not renewed for so long is gone; it renews it every 10 s.
const SILENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, PartialEq)]
pub enum State {
    /// Nothing is there yet.
    Starting,
    Running,
    /// On this host, as far as can be told from here.
    RunningOn(String),
    Finished,
    Stopped(String),
    Failed(String),
    /// Its process ended without a word: it was killed, or its machine went down.
    Gone,
}

/// Looks at a run's folder again and again.
#[derive(Default)]
pub struct Watch {
    /// Beat of a lock whose holder can't be asked, and when it was seen first.
    beat: Option<(String, Duration)>,
}

impl Watch {
    /// State now; `complete`: all steps of the run were made.
    pub fn look(&mut self, folder: &Path, complete: bool, now: Duration) -> State {
        if let Some(ending) = ending(folder) {
            return match (ending.how, ending.why.unwrap_or_default()) {
                (Ended::Finished, _) => State::Finished,
                (Ended::Stopped, why) => State::Stopped(why),
                (Ended::Failed, why) => State::Failed(why),
            };
        }
        let Some(holder) = Holder::of(folder) else {
            // Earlier versions didn't record an end.
            let holds = |name: &str| folder.join(name).is_file();
            return match complete || holds("weights.safetensors") {
                true => State::Finished,
                false if holds("run.json") || holds("metrics.jsonl") => State::Gone,
                false => State::Starting,
            };
        };
        match holder.lives() {
            Some(true) => State::Running,
            Some(false) if complete => State::Finished,
            Some(false) => State::Gone,
            None => {
                let since =
                    self.beat.take_if(|(beat, _)| *beat == holder.beat).map_or(now, |(_, since)| since);
                self.beat = Some((holder.beat, since));
                if now.saturating_sub(since) > SILENCE { State::Gone } else { State::RunningOn(holder.host) }
            }
        }
    }
}

fn ending(folder: &Path) -> Option<Ending> {
    serde_json::from_slice(&std::fs::read(folder.join(Ending::FILE)).ok()?).ok()
}

impl State {
    pub fn goes_on(&self) -> bool {
        matches!(self, State::Starting | State::Running | State::RunningOn(_))
    }

    /// In words; `left`: seconds that are left, where that can be told.
    pub fn text(&self, left: Option<f64>) -> String {
        let left = left.map_or(String::new(), |left| format!(" · {} left", seconds(left)));
        match self {
            State::Starting => "starting".into(),
            State::Running => format!("running{left}"),
            State::RunningOn(host) => format!("running on {host}{left}"),
            State::Finished => "finished".into(),
            State::Stopped(why) if why.is_empty() => "stopped".into(),
            State::Stopped(why) => format!("stopped by {why}"),
            State::Failed(why) => format!("failed: {why}"),
            State::Gone => "interrupted: its process was killed, or its machine went down".into(),
        }
    }

    /// In one word, for lists and styles.
    pub fn word(&self) -> &'static str {
        match self {
            State::Starting => "starting",
            State::Running | State::RunningOn(_) => "running",
            State::Finished => "finished",
            State::Stopped(_) => "stopped",
            State::Failed(_) => "failed",
            State::Gone => "interrupted",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use testing::Folder;

    #[test]
    fn the_folder_tells_how_a_run_is() {
        let folder = Folder::new("run-state");
        let mut watch = Watch::default();
        let mut look = |second| watch.look(&folder.0, false, Duration::from_secs(second));
        assert_eq!(look(0), State::Starting);
        folder.file("run.json", b"[]");
        assert_eq!(look(0), State::Gone, "no lock, and not all steps");
        let me = Holder::me("0000000000".into());
        let lock = |holder: &Holder| folder.file(".lock", serde_json::to_string(holder).unwrap().as_bytes());
        lock(&me);
        assert_eq!(look(0), State::Running);
        lock(&Holder { started: "0".into(), ..me.clone() });
        assert_eq!(look(0), State::Gone, "another process has its pid");
        // A holder that can't be asked is believed while its lock beats.
        let away = Holder { machine: "another".into(), host: "node7".into(), ..me.clone() };
        lock(&away);
        assert_eq!(look(0), State::RunningOn("node7".into()));
        assert_eq!(look(60), State::RunningOn("node7".into()));
        assert_eq!(look(61), State::Gone);
        lock(&Holder { beat: "0000000001".into(), ..away });
        assert_eq!(look(62), State::RunningOn("node7".into()));
        folder.file(".lock", b"half writ");
        assert_eq!(look(0), State::Gone);
        // A record of the end is believed at once, though the process is still there.
        lock(&me);
        for (text, state) in [
            (r#"{"how":"finished","steps":3,"ended":1}"#, State::Finished),
            (
                r#"{"how":"stopped","why":"Ctrl-C","steps":3,"ended":1,"schema":1}"#,
                State::Stopped("Ctrl-C".into()),
            ),
            (r#"{"how":"failed","why":"disk full","steps":3,"ended":1}"#, State::Failed("disk full".into())),
            (r#"{"how":"#, State::Running),
        ] {
            folder.file("ended.json", text.as_bytes());
            assert_eq!(look(0), state);
        }
    }
}
