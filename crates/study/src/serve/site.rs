//! What a server answers: its page, the page of every run below its folder, and their data.

use super::budget::{Budget, Clock, Kept};
use super::folder;
use super::http::{Request, Response, unescaped};
use super::live::{self, Live};
use super::runs::{Runs, Wanted};
use super::token::Token;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// What a server shows.
#[derive(Clone, Debug, PartialEq)]
pub enum Shows {
    /// A run or a study, which may come into being later.
    One(PathBuf),
    /// All runs and studies below a folder.
    Below(PathBuf),
}

impl Shows {
    /// The run or study in a folder, or else all below it.
    pub fn of(folder: &Path) -> Shows {
        match folder::kind(folder) {
            Some(_) => Shows::One(folder.to_path_buf()),
            None => Shows::Below(folder.to_path_buf()),
        }
    }
}

/// Pages whose state is kept; of more, the one that was asked for longest ago is read anew when it is asked for again.
const VIEWS: usize = 16;

pub struct Site {
    token: Token,
    clock: Arc<dyn Clock>,
    pages: Mutex<Pages>,
}

struct Pages {
    shows: Shows,
    runs: Runs,
    /// The one that was asked for last is the last.
    views: Vec<View>,
    budget: Budget,
}

struct View {
    key: Key,
    /// What a page of a folder has read so far.
    live: Option<Live>,
    kept: Kept,
}

#[derive(Clone, PartialEq)]
enum Key {
    /// A folder, and whether there is a list it is in.
    Folder(PathBuf, bool),
    List(Wanted),
}

/// The page is the same for all; its fonts are worth encoding once.
static PAGE: LazyLock<Arc<[u8]>> = LazyLock::new(|| live::page().into_bytes().into());

impl Site {
    pub fn new(shows: Shows, token: Token, clock: Arc<dyn Clock>) -> Site {
        let (Shows::One(folder) | Shows::Below(folder)) = &shows;
        let (runs, budget) = (Runs::below(folder), Budget::start(&*clock));
        Site { token, clock, pages: Mutex::new(Pages { shows, runs, views: vec![], budget }) }
    }

    pub fn respond(&self, request: &Request) -> Response {
        if request.method != "GET" {
            return Response::refusal(405, "only GET is answered");
        }
        let path = request.path.strip_prefix('/').unwrap_or(&request.path);
        let (word, rest) = path.split_once('/').map_or((path, None), |(word, rest)| (word, Some(rest)));
        if !self.token.is(word) {
            return Response::refusal(
                403,
                "this page needs its token: open the whole URL that vitesse printed (behind a tunnel with the tunnel's host and port)",
            );
        }
        match rest {
            None => Response::elsewhere(format!("/{}/", self.token.text())),
            Some("") => Response::html(Arc::clone(&PAGE)),
            Some("live.json") => self.root(request),
            Some(rest) => self.run(rest),
        }
    }

    /// Lets whoever asks next see what there is by then.
    pub fn draw_anew(&self) {
        let mut pages = self.pages();
        let Pages { views, budget, .. } = &mut *pages;
        views.iter_mut().for_each(|view| view.kept.forget(budget));
    }

    /// A panic while drawing must not end the page for good.
    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn root(&self, request: &Request) -> Response {
        let mut pages = self.pages();
        let key = match &pages.shows {
            Shows::One(folder) => Key::Folder(folder.clone(), false),
            Shows::Below(_) => Key::List(Wanted::asked(request)),
        };
        pages.answer(key, &*self.clock)
    }

    /// The page of a run in the list, or its data.
    fn run(&self, rest: &str) -> Response {
        let missing = || Response::refusal(404, "not found: there is no such run, or not any more");
        let mut pages = self.pages();
        let Shows::Below(root) = &pages.shows else { return missing() };
        let name = rest.strip_prefix("run/").and_then(|rest| rest.split_once('/'));
        let Some((id, what)) = name.filter(|(_, what)| matches!(*what, "" | "live.json")) else {
            return missing();
        };
        match unescaped(id).and_then(|name| folder_below(root, &name)) {
            None => missing(),
            Some(_) if what.is_empty() => Response::html(Arc::clone(&PAGE)),
            Some(folder) => pages.answer(Key::Folder(folder, true), &*self.clock),
        }
    }
}

/// The folder of a run by its name in the list, if there is one. No name leads out of the folder.
fn folder_below(root: &Path, name: &str) -> Option<PathBuf> {
    let plain = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.contains('\0');
    let path = name.split('/').all(plain).then(|| root.join(name))?;
    folder::kind(&path).map(|_| path)
}

impl Pages {
    fn answer(&mut self, key: Key, clock: &dyn Clock) -> Response {
        let known = self.views.iter().position(|view| view.key == key);
        let view = known.map(|place| self.views.remove(place)).unwrap_or_else(|| {
            let live = if let Key::Folder(folder, _) = &key { Some(Live::new(folder.clone())) } else { None };
            View { key, live, kept: Kept::default() }
        });
        if self.views.len() >= VIEWS {
            self.views.remove(0);
        }
        self.views.push(view);
        let Pages { views, budget, runs, .. } = self;
        let Some(View { key, live, kept }) = views.last_mut() else { return waiting() };
        let drawn = kept.answer(clock, budget, || match (key, live) {
            (Key::Folder(_, listed), Some(live)) => live.json(clock.now(), *listed),
            (Key::List(wanted), _) => runs.json(clock.now(), wanted),
            (Key::Folder(..), None) => String::new(),
        });
        drawn.map_or_else(waiting, Response::json)
    }
}

/// What is said when there is no time to draw.
fn waiting() -> Response {
    let state = "waiting: pages take no more than 5% of a core, and others were drawn just now";
    let sections = json!({ "now": "", "figures": "", "log": "", "facts": "" });
    let answer = json!({ "title": "…", "about": "", "state": state, "share": 0, "sections": sections });
    Response::json(answer.to_string().into_bytes().into())
}
