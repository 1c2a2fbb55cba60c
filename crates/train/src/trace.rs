//! What happened when, as a file that chrome://tracing and Perfetto show: a process for each rank, a row for each lane.

use crate::error::TrainError;
use crate::session::Finished;
use comm::Communicator;
use devices::Real;
use devices::device::{Device, Event};
use graph::Lane;
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Meetings by which the ranks' clocks are compared.
const MEETINGS: usize = 9;

/// Collects the events of some steps of one rank.
pub struct Trace {
    path: PathBuf,
    /// Steps that are still to be traced.
    left: u64,
    events: Vec<Event>,
    /// What the host does: reading images, and whole steps.
    host: Vec<(String, Instant, Instant)>,
    /// What to know of the events.
    note: Option<String>,
}

impl Trace {
    pub fn new(path: &Path, steps: u64) -> Self {
        let (events, host, note) = (Vec::new(), Vec::new(), None);
        Trace { path: path.to_path_buf(), left: steps, events, host, note }
    }

    /// Takes in a step that has just ended. Says whether it was the last.
    pub fn step<T: Real>(&mut self, finished: &Finished, device: &mut dyn Device<T>) -> bool {
        device.take_trace(&mut self.events);
        self.note = device.note_on_times();
        let Finished { step, began, ended, .. } = *finished;
        self.host.push((format!("step {step}"), began, ended));
        self.left = self.left.saturating_sub(1);
        self.left == 0
    }

    /// Brings the ranks' events together, on the clock of rank 0, and writes the file there.
    pub fn write(self, world: &Communicator) -> Result<Option<PathBuf>, TrainError> {
        let origin = self.host.first().map_or_else(Instant::now, |(_, began, _)| *began);
        let offset = self.offset(world, origin)?;
        let (rank, name) = (world.rank(), world.name("the trace"));
        let lines = self.lines(rank, origin, offset);
        let texts = world.gather_bytes(name, lines.join(",\n").as_bytes())?;
        if rank != 0 {
            return Ok(None);
        }
        let written = files::replace(&self.path, |file| {
            file.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n")?;
            for (rank, text) in texts.iter().enumerate() {
                file.write_all(if rank == 0 { b"" } else { b",\n" })?;
                file.write_all(text)?;
            }
            file.write_all(b"\n]}\n")
        });
        written.map_err(|source| TrainError::Io { path: self.path.clone(), source })?;
        Ok(Some(self.path))
    }

    /// Microseconds to add to this rank's times: ranks leave a barrier together, so what their clocks show then is compared.
    fn offset(&self, world: &Communicator, origin: Instant) -> Result<f64, TrainError> {
        let name = world.name("comparing clocks");
        let mut offsets = Vec::with_capacity(MEETINGS);
        for _ in 0..MEETINGS {
            world.barrier(name)?;
            let mine = [origin.elapsed().as_secs_f64() * 1e6];
            let mut all = vec![0.0; world.size()];
            world.all_gather(name, &mine, &mut all)?;
            offsets.push(all[0] - mine[0]);
        }
        offsets.sort_by(f64::total_cmp);
        Ok(offsets[MEETINGS / 2])
    }

    /// A JSON object for each event.
    fn lines(&self, rank: usize, origin: Instant, offset: f64) -> Vec<String> {
        let micros = |at: Instant| at.saturating_duration_since(origin).as_secs_f64() * 1e6 + offset;
        let about = |what: &str, tid: usize, name: &str| {
            json!({"ph": "M", "name": what, "pid": rank, "tid": tid, "args": {"name": name}}).to_string()
        };
        let mut lines = vec![about("process_name", 0, &format!("rank {rank}"))];
        lines.push(about("thread_name", 0, "steps"));
        if let Some(note) = &self.note {
            lines.push(
                json!({"ph": "M", "name": "process_labels", "pid": rank, "args": {"labels": note}})
                    .to_string(),
            );
        }
        for (i, lane) in Lane::ALL.iter().enumerate() {
            lines.push(about("thread_name", i + 1, lane.name()));
        }
        let event = |name: &str, kind: &str, tid: usize, start: Instant, end: Instant| {
            let (start, end) = (micros(start), micros(end));
            json!({"ph": "X", "name": name, "cat": kind, "pid": rank, "tid": tid, "ts": start, "dur": end - start})
                .to_string()
        };
        lines.extend(self.host.iter().map(|(name, start, end)| event(name, "step", 0, *start, *end)));
        // A step that was in flight when the last one was known is not in it.
        let end = self.host.last().map_or(origin, |(.., end)| *end);
        lines.extend(self.events.iter().filter(|e| e.start < end).map(|e| {
            let lane = Lane::ALL.iter().position(|lane| *lane == e.lane).unwrap_or(0);
            event(&e.name, e.phase.name(), lane + 1, e.start, e.end)
        }));
        lines
    }
}
