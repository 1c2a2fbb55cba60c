//! Runs and studies below a folder: found by walking it, read a few at a time, shown a page at a time. A look does a bounded amount of
//! work, however many there are; what is not read yet is read by the next looks. Folders may appear, vanish or be half written at any moment.

mod row;
mod walk;

use super::folder::named;
use super::http::{Request, escaped};
use crate::report::live::{self as drawn, Listed, counted, grouped};
use row::Row;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;
use walk::Walk;

/// Folders that a look reads.
const READ: usize = 200;
/// Entries of folders that a look goes through.
const ENTRIES: usize = 4000;
/// Runs in the list; more are left out, and that is said.
const MOST: usize = 20_000;
/// Runs on a page.
const SHOWN: usize = 100;

/// What a page of the list is to show.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// From 0 on.
    page: usize,
    /// Words that name, model, data or state have.
    find: String,
}

impl Wanted {
    pub fn asked(request: &Request) -> Wanted {
        let page: usize = request.asked("page").and_then(|page| page.parse().ok()).unwrap_or(1);
        let find = request.asked("q").unwrap_or_default().trim().to_lowercase();
        Wanted { page: page.clamp(1, MOST) - 1, find: find.chars().take(100).collect() }
    }

    fn href(&self, page: usize) -> String {
        let find = if self.find.is_empty() { String::new() } else { format!("&q={}", escaped(&self.find)) };
        format!("?page={}{find}", page + 1)
    }
}

pub struct Runs {
    root: PathBuf,
    walk: Walk,
    /// By their way from the root.
    rows: BTreeMap<String, Row>,
    /// Walks that were begun.
    round: u64,
    /// Flag: all folders were seen once.
    complete: bool,
    /// The last row that was read again.
    read: String,
}

impl Runs {
    pub fn below(root: &Path) -> Runs {
        let (root, walk) = (root.to_path_buf(), Walk::new(root));
        Runs { root, walk, rows: BTreeMap::new(), round: 1, complete: false, read: String::new() }
    }

    /// Walks on, and reads on.
    fn look(&mut self, now: Duration) {
        let (rows, round) = (&mut self.rows, self.round);
        let done = self.walk.go_on(ENTRIES, &mut |name, folder, kind| {
            if rows.len() < MOST || rows.contains_key(&name) {
                rows.entry(name).or_insert_with(|| Row::new(folder, kind)).round = round;
            }
        });
        if done {
            // Whatever this walk didn't meet is gone.
            self.rows.retain(|_, row| row.round == round);
            (self.walk, self.round, self.complete) = (Walk::new(&self.root), round + 1, true);
        }
        for name in self.due() {
            let Some(row) = self.rows.get_mut(&name) else { continue };
            if !row.look(now) {
                self.rows.remove(&name);
            }
        }
    }

    /// Rows to be read now: those that never were, then those that go on, then others in turn.
    fn due(&mut self) -> Vec<String> {
        let named = |(name, _): (&String, &Row)| name.clone();
        let mut due: Vec<String> =
            self.rows.iter().filter(|row| !row.1.was_read).take(READ).map(named).collect();
        let left = READ - due.len();
        let going_on = self.rows.iter().filter(|row| row.1.was_read && row.1.goes_on()).take(left / 2);
        due.extend(going_on.map(named));
        let left = READ - due.len();
        let others = || self.rows.iter().filter(|row| row.1.was_read && !row.1.goes_on());
        let after =
            others().filter(|row| *row.0 > self.read).chain(others().filter(|row| *row.0 <= self.read));
        let others: Vec<String> = after.take(left).map(named).collect();
        self.read = others.last().cloned().unwrap_or_default();
        due.extend(others);
        due
    }

    /// The data of a page of the list as it is now.
    pub fn json(&mut self, now: Duration, wanted: &Wanted) -> String {
        self.look(now);
        let mut rows: Vec<(&String, &Row)> =
            self.rows.iter().filter(|(name, row)| row.was_read && row.matches(name, &wanted.find)).collect();
        // Those that go on first, then the newest.
        rows.sort_by_key(|(name, row)| (!row.goes_on(), std::cmp::Reverse(row.started()), *name));
        let pages = rows.len().div_ceil(SHOWN).max(1);
        let page = wanted.page.min(pages - 1);
        let shown = &rows[page * SHOWN..rows.len().min((page + 1) * SHOWN)];
        let listed: Vec<Listed<'_>> = shown.iter().map(|(name, row)| row.listed(name)).collect();
        let before = (page > 0).then(|| wanted.href(page - 1));
        let after = (page + 1 < pages).then(|| wanted.href(page + 1));
        let none = if wanted.find.is_empty() {
            "No run and no study is here yet. What `vitesse train --out` and `vitesse study --out` write below this folder appears by itself."
        } else {
            "No run has these words in its name, model, data or state."
        };
        let sections = json!({
            "now": "", "log": "", "facts": "", "figures": drawn::list(&listed, before, after, none),
        });
        let about =
            std::path::absolute(&self.root).unwrap_or_else(|_| self.root.clone()).display().to_string();
        json!({
            "title": named(&self.root), "about": about, "state": self.state(rows.len(), page, wanted), "word": "",
            "share": 0, "find": true, "sections": sections,
        })
        .to_string()
    }

    /// How many there are, in words.
    fn state(&self, found: usize, page: usize, wanted: &Wanted) -> String {
        let count = |word: &str| self.rows.values().filter(|row| row.word() == word).count();
        let studies = self.rows.values().filter(|row| row.is_study()).count();
        let mut state = vec![counted(self.rows.len() - studies, "run")];
        if studies > 0 {
            state.push(if studies == 1 { "1 study".into() } else { format!("{studies} studies") });
        }
        for word in ["running", "finished", "stopped", "failed", "interrupted"] {
            let n = count(word);
            state.extend((n > 0).then(|| format!("{} {word}", grouped(n as f64))));
        }
        if !wanted.find.is_empty() {
            state.push(format!("{} found", grouped(found as f64)));
        }
        if found > SHOWN {
            let (from, to) = (page * SHOWN + 1, found.min((page + 1) * SHOWN));
            state.push(format!("{from} to {to} are shown"));
        }
        if !self.complete || self.rows.values().any(|row| !row.was_read) {
            state.push("still looking".into());
        }
        if self.rows.len() >= MOST {
            state.push(format!(
                "more than {} are left out: serve a folder further down",
                grouped(MOST as f64)
            ));
        }
        state.join(" · ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use testing::Folder;

    fn run(folder: &Folder, name: &str, started: u64) {
        let machine = r#"{"host":"vm","os":"","kernel":"","cpu":"","threads":2,"simd":"","memory_bytes":1}"#;
        let launch = format!(
            r#"[{{"command":["vitesse"],"folder":"/","started":{started},"version":"1","machine":{machine}}}]"#
        );
        folder.file(&format!("{name}/run.json"), launch);
        folder.file(&format!("{name}/config.json"), r#"{"model":"vit-ti/4","steps":2}"#);
        folder.file(&format!("{name}/metrics.jsonl"), "{\"step\":1,\"epoch\":0,\"loss\":0.5,\"lr\":1}\n");
    }

    fn seen(runs: &mut Runs, page: usize, find: &str) -> (String, String) {
        let wanted = Wanted { page, find: find.into() };
        let answer: serde_json::Value = serde_json::from_str(&runs.json(Duration::ZERO, &wanted)).unwrap();
        (answer["state"].as_str().unwrap().into(), answer["sections"]["figures"].as_str().unwrap().into())
    }

    /// Thousands of runs: a look does its share and no more, and all are there in the end.
    #[test]
    fn thousands_of_runs_are_read_a_few_at_a_time() {
        let folder = Folder::new("runs-many");
        for i in 0..1000 {
            run(&folder, &format!("sweep-{}/run {i:04}", i % 7), i);
        }
        let mut runs = Runs::below(&folder.0);
        let mut read = 0;
        for look in 1..=5 {
            let (state, html) = seen(&mut runs, 0, "");
            let now = runs.rows.values().filter(|row| row.was_read).count();
            assert!(now - read <= READ && html.matches("<li").count() == 100.min(now), "{look}: {state}");
            assert_eq!(state.contains("still looking"), look < 5, "{look}: {state}");
            read = now;
        }
        let (state, html) = seen(&mut runs, 0, "");
        assert_eq!(state, "1000 runs · 1,000 finished · 1 to 100 are shown");
        assert!(
            html.contains(">sweep-5/run 0999</a>") && html.contains("href=\"run/sweep-5%2Frun%200999/\"")
        );
        assert!(html.contains("?page=2") && !html.contains("newer"), "{html:.200}");
        let (_, last) = seen(&mut runs, 99, "");
        assert!(last.contains("run 0000</a>") && last.contains("newer") && !last.contains("older"));
        let (state, html) = seen(&mut runs, 0, "run 0123");
        assert!(state.ends_with("1 found") && html.matches("<li").count() == 1, "{state}");
    }

    #[test]
    fn folders_appear_vanish_and_are_half_written() {
        let folder = Folder::new("runs-change");
        let mut runs = Runs::below(&folder.0.join("later"));
        assert!(seen(&mut runs, 0, "").1.contains("No run and no study is here yet"));
        run(&folder, "later/a", 1);
        run(&folder, "later/.a.start-vm-1.tmp", 1);
        run(&folder, "later/deep/er/b", 2);
        folder.file("later/torn/run.json", "[{\"comm");
        folder.file("later/torn/metrics.jsonl", "{\"st");
        folder.file("later/study/study.json", "{\"form");
        run(&folder, "later/study/runs/p1.0", 3);
        folder.file("later/notes/todo.txt", "");
        // A circle.
        std::os::unix::fs::symlink(&folder.0, folder.0.join("later/notes/up")).unwrap();
        // The walk that found nothing was the last one; the next one finds them.
        let (state, html) = seen(&mut runs, 0, "");
        assert_eq!(state, "3 runs · 1 study · 2 finished · 1 stopped · 1 interrupted", "{html}");
        assert!(html.find(">deep/er/b<").unwrap() < html.find(">a<").unwrap(), "the newest first: {html}");
        assert!(!html.contains("p1.0"), "runs of a study are on its page");
        std::fs::remove_dir_all(folder.0.join("later/deep")).unwrap();
        std::fs::remove_file(folder.0.join("later/a/run.json")).unwrap();
        std::fs::remove_file(folder.0.join("later/a/metrics.jsonl")).unwrap();
        assert_eq!(seen(&mut runs, 0, "").0, "1 run · 1 study · 1 stopped · 1 interrupted");
    }

    /// A data set below the folder is not gone through image by image.
    #[test]
    fn folders_of_many_files_are_left() {
        let folder = Folder::new("runs-data");
        for i in 0..2 * walk::FILES {
            std::fs::create_dir_all(folder.0.join("data/train")).unwrap();
            std::fs::write(folder.0.join(format!("data/train/{i}.jpg")), "").unwrap();
        }
        run(&folder, "z/run", 1);
        let mut walk = Walk::new(&folder.0);
        let (mut found, mut looks) = (0, 1);
        while !walk.go_on(100, &mut |_, _, _| found += 1) {
            looks += 1;
        }
        assert!(found == 1 && looks <= walk::FILES / 100 + 2, "{looks} looks");
    }
}
