//! What keeps a point from being faster: rules over its account, each with the arithmetic that its sentence states.
//!
//! Every rule says which share of the step its cause takes. The largest that is worth naming is the limiter; if none is, computing is.
//! A point that is compared with its base begins with what it lost against that, part by part (`losses`).
//! An oversubscribed point is named so whatever its account says, since cores that are shared distort all of it.

mod losses;

use crate::factors::middle_runs;
use crate::results::{Cause, Kind, Limiter, Lost, Measured, Point};
use crate::stats::median;
use records::Parts;

/// Shares of a step below this are not worth naming.
const WORTH: f64 = 0.10;
/// A rank this much slower than the others is a straggler.
const SLOWER: f64 = 1.15;
/// Images of a rank in a step up to which a batch is tiny.
const TINY: usize = 8;
/// Computing of a rank in a step under which there is little to divide.
const LITTLE: f64 = 5e-3;
/// Bytes/s under which the link makes communication slow, and not the number of collectives.
const SLOW_LINK: f64 = 0.5e9;

/// What a rule found: the share that its cause takes, and what to say.
struct Found {
    share: f64,
    limiter: Limiter,
}

fn found(share: f64, cause: Cause, sentence: String) -> Option<Found> {
    (share >= WORTH).then_some(Found { share, limiter: plain(cause, sentence) })
}

fn plain(cause: Cause, sentence: String) -> Limiter {
    Limiter { cause, sentence, lost: vec![] }
}

/// The rank whose own work takes longest.
struct Slowest {
    rank: usize,
    /// Against the usual one of the others.
    slower: f64,
    /// More than half of that is waiting for its images.
    late: bool,
}

fn mean_of(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / numbers.len().max(1) as f64
}

/// The account of a point: mean steps of its runs.
pub struct Account<'a> {
    point: &'a Point,
    ranks: Vec<Parts>,
    mean: Parts,
    seconds: f64,
    /// From the end of a step to that of the next, by the rank whose account is longest in it.
    step: f64,
    /// Of the places in batches, those that no image filled.
    padding: f64,
    communication_bytes: f64,
    communication_rate: f64,
    cpu: Option<f64>,
}

impl<'a> Account<'a> {
    pub fn of(point: &'a Point) -> Option<Self> {
        Self::over(point, point.runs.iter().filter_map(|run| run.measured()).collect())
    }

    /// Of the run whose images/s are the median, or the two beside it: efficiency is a quotient of medians, and this is the
    /// account behind it.
    fn typical(point: &'a Point) -> Option<Self> {
        let middle = middle_runs(point);
        let rates: Vec<f64> = middle.iter().map(|run| run.images_per_second).collect();
        let times: Vec<f64> = rates.iter().map(|rate| 1.0 / rate).collect();
        // The mean of two rates is not that of the times they stand for.
        let factor = 1.0 / (mean_of(&rates) * mean_of(&times));
        let mut account = Self::over(point, middle)?;
        account.ranks.iter_mut().for_each(|parts| *parts = *parts * factor);
        account.mean = account.mean * factor;
        (account.seconds, account.step) = (factor * account.seconds, factor * account.step);
        Some(account)
    }

    fn over(point: &'a Point, runs: Vec<&Measured>) -> Option<Self> {
        let of_rank = |rank: usize| {
            let parts: Vec<Parts> = runs.iter().filter_map(|run| run.ranks.get(rank)).copied().collect();
            (!parts.is_empty()).then(|| Parts::mean(&parts))
        };
        let ranks: Vec<Parts> = (0..point.settings.ranks).map_while(of_rank).collect();
        let all = Parts::mean(&ranks);
        let each = |f: fn(&Measured) -> f64| median(&runs.iter().map(|run| f(run)).collect::<Vec<_>>());
        let places = each(|run| run.step_seconds.len() as f64) * point.settings.global_batch as f64;
        (!ranks.is_empty() && all.wall() > 0.0).then(|| Account {
            point,
            mean: all,
            seconds: all.wall(),
            step: runs.iter().map(|run| mean_of(&run.step_seconds)).sum::<f64>() / runs.len() as f64,
            ranks,
            padding: (1.0 - each(|run| run.images as f64) / places).max(0.0),
            communication_bytes: each(|run| run.communication_bytes as f64),
            communication_rate: each(|run| run.communication_bytes_per_second),
            cpu: runs
                .iter()
                .map(|run| run.cpu_utilisation)
                .collect::<Option<Vec<f64>>>()
                .map(|all| median(&all)),
        })
    }

    fn share(&self, seconds: f64) -> f64 {
        seconds / self.seconds
    }

    /// Images of a rank in a step.
    fn images(&self) -> usize {
        self.point.settings.batch_per_rank * self.point.settings.accumulation
    }

    /// What a step costs however few images it has.
    fn fixed(&self) -> f64 {
        self.mean.communication + self.mean.optimizer + self.mean.idle + self.mean.wait
    }

    /// How long ranks wait, on the mean, for the one that is slowest over all steps. What they wait beyond that is for one that is
    /// slow in a step alone.
    fn waits_for_one(&self) -> f64 {
        let longest = self.ranks.iter().map(Parts::own).fold(0.0, f64::max);
        let behind =
            self.ranks.iter().map(|parts| longest - parts.own()).sum::<f64>() / self.ranks.len() as f64;
        behind.min(self.mean.wait)
    }

    fn slowest(&self) -> Option<Slowest> {
        let ranks = &self.ranks;
        let rank = (0..ranks.len()).max_by(|a, b| ranks[*a].own().total_cmp(&ranks[*b].own()))?;
        let usual = median(&self.others(rank, Parts::own));
        let late = ranks[rank].data - median(&self.others(rank, |parts| parts.data));
        let late = late > 0.5 * (ranks[rank].own() - usual);
        (ranks.len() > 1).then(|| Slowest { rank, slower: ranks[rank].own() / usual, late })
    }

    /// Something of all ranks but one.
    fn others(&self, rank: usize, f: fn(&Parts) -> f64) -> Vec<f64> {
        self.ranks.iter().enumerate().filter(|(other, _)| *other != rank).map(|(_, parts)| f(parts)).collect()
    }

    fn slow_link(&self) -> bool {
        self.communication_bytes > 0.0
            && self.communication_rate < SLOW_LINK
            && self.mean.communication > 0.5 * self.fixed()
    }
}

/// Names the limiter of a point. `base` is the point it is compared with, if there is one.
pub fn limiter(point: &Point, base: Option<&Point>, oversubscribed: bool, cores: usize) -> Option<Limiter> {
    let account = Account::of(point)?;
    if oversubscribed {
        return Some(crowded(&account, cores));
    }
    let rules = [
        starved(&account, cores),
        straggler(&account),
        waiting(&account),
        data(&account, cores),
        communication(&account, base.is_some_and(|base| base.id != point.id)),
        padded(&account),
        tiny_batch(&account),
        little_work(&account),
        optimizer(&account),
    ];
    let starved = rules[0].is_some();
    let largest = rules.into_iter().flatten().max_by(|a, b| a.share.total_cmp(&b.share));
    let largest = largest.map(|found| found.limiter);
    let base = base.filter(|base| base.id != point.id);
    let efficiency = point.summary.as_ref().and_then(|summary| summary.efficiency.as_ref());
    let typical = (Account::typical(point), base.and_then(Account::typical));
    let mut lost = vec![];
    if let ((Some(here), Some(there)), Some(efficiency)) = (&typical, efficiency) {
        lost = losses::losses(here, there, efficiency.median);
        if let Some(limiter) = explained(here, there, starved, lost.clone(), largest.as_ref()) {
            return Some(limiter);
        }
    }
    let base = base.and_then(Account::of);
    Some(Limiter { lost, ..largest.unwrap_or_else(|| computing(&account, base.as_ref())) })
}

/// What is lost, and what the rule for its largest share advises.
fn explained(
    account: &Account,
    base: &Account,
    starved: bool,
    lost: Vec<Lost>,
    rule: Option<&Limiter>,
) -> Option<Limiter> {
    let largest = losses::largest(&lost)?;
    let mut sentence = losses::sentence(&largest, account, base, starved);
    // The others have more to say than what was said already.
    if let Some(rule) = rule.filter(|rule| rule.cause != Cause::Waiting) {
        sentence += &format!("; {}", rule.sentence);
    }
    let cause = match rule {
        Some(rule) if largest.all < (100.0 * WORTH) as i64 => rule.cause,
        _ => largest.named.first()?.0,
    };
    Some(Limiter { cause, sentence, lost })
}

fn crowded(account: &Account, cores: usize) -> Limiter {
    let settings = &account.point.settings;
    let (ranks, threads) = (settings.ranks, settings.threads_per_rank);
    let mut sentence = format!(
        "too few cores: {ranks} ranks × {} on {cores} cores, so that each core does the work of {:.1}; ranks wait {:.0}% of the time \
         for each other's turn",
        counted(threads, "thread"),
        (ranks * threads) as f64 / cores.max(1) as f64,
        percent(account.share(account.mean.wait + account.mean.communication)),
    );
    if let Some(busy) = account.cpu {
        sentence += &format!("; the cores are {:.0}% busy", percent(busy));
    }
    plain(Cause::Oversubscribed, sentence)
}

/// Threads that have something to compute and no core to do it on: other programs have them.
fn starved(account: &Account, cores: usize) -> Option<Found> {
    let settings = &account.point.settings;
    if settings.device != "cpu" {
        return None;
    }
    let computing = account.share(account.mean.compute + account.mean.optimizer);
    let threads = (settings.ranks * settings.threads_per_rank) as f64;
    let got = account.cpu? * (cores * settings.hosts) as f64 / threads;
    let sentence = format!(
        "other programs use the cores: threads have something to compute {:.0}% of the time, and a core {:.0}% of it",
        percent(computing),
        percent(got)
    );
    // Threads of a rank never all work all of the time.
    found(computing - got, Cause::Oversubscribed, sentence).filter(|found| found.share > 0.3 * computing)
}

/// A rank whose own work takes longer than that of the others, which wait for it.
fn straggler(account: &Account) -> Option<Found> {
    let ranks = &account.ranks;
    let Slowest { rank: slowest, slower, late } = account.slowest()?;
    let waits = account.others(slowest, |parts| parts.wait / parts.wall());
    let waiting = waits.iter().sum::<f64>() / waits.len().max(1) as f64;
    if !(slower >= SLOWER && waiting >= WORTH) {
        return None;
    }
    if late {
        let sentence = format!(
            "data loading limits: rank {slowest} waits {:.0}% of its time for images, and the others {:.0}% of theirs for it",
            percent(ranks[slowest].data / ranks[slowest].wall()),
            percent(waiting)
        );
        return found(waiting, Cause::Data, sentence);
    }
    // If the work were divided by speed, all would end together.
    let speeds: f64 = ranks.iter().map(|p| 1.0 / p.own()).sum();
    let balanced = ranks.len() as f64 / speeds;
    let sentence = format!(
        "rank {slowest} is {slower:.1}× slower: the others wait {:.0}% of their time for it; --balance, which divides images by speed, \
         would bring a step from {} to about {}",
        percent(waiting),
        time(ranks[slowest].own()),
        time(balanced)
    );
    found(waiting, Cause::Straggler, sentence)
}

/// Ranks that take as long as each other on the mean, and not in a step.
fn waiting(account: &Account) -> Option<Found> {
    let share = account.share(account.mean.wait - account.waits_for_one());
    let sentence = format!(
        "ranks wait {:.0}% of the time for whoever is slowest in a step, a different one each time; longer steps, by accumulation or \
         larger batches, even that out",
        percent(share)
    );
    found(share, Cause::Waiting, sentence)
}

/// Waiting for images. Loader threads are all busy then, so that their number times the step is what a batch takes them.
fn data(account: &Account, cores: usize) -> Option<Found> {
    let share = account.share(account.mean.data);
    let settings = &account.point.settings;
    let (ranks, now) = (settings.ranks, settings.loader_threads.max(1));
    let rest = account.seconds - account.mean.data;
    let enough = (now as f64 * account.seconds / rest.max(1e-9)).ceil().min(1e6) as usize;
    let mut sentence = format!(
        "data loading limits: ranks wait {:.0}% of the time for images; {} would feed {} (now {})",
        percent(share),
        counted(enough * ranks, "loader thread"),
        counted(ranks, "rank"),
        now * ranks
    );
    let local = settings.hosts == 1 && settings.comm != "launcher";
    let busy = account.cpu.is_some_and(|busy| busy > 0.9);
    if local && busy && (enough + settings.threads_per_rank) * ranks > cores {
        sentence += &format!(", more than the {cores} cores have room for");
    }
    found(share, Cause::Data, sentence)
}

/// Communication that nothing hides.
fn communication(account: &Account, compared: bool) -> Option<Found> {
    let Parts { communication, hidden, .. } = account.mean;
    let share = account.share(communication);
    if !account.slow_link() && account.images() <= TINY {
        return None;
    }
    let rate = account.communication_rate;
    let sentence = format!(
        "exposed communication {:.0}%: {} per step at {}/s ({:.2} Gbit/s), {:.0}% of it hidden behind computing; {}",
        percent(share),
        bytes(account.communication_bytes),
        bytes(rate),
        8.0 * rate / 1e9,
        percent(hidden / (hidden + communication).max(1e-12)),
        less_communication(account, compared),
    );
    found(share, Cause::Communication, sentence)
}

/// Advice against exposed communication: more micro-steps for each all-reduce, which spread the optimizer's update, too. From
/// stage 2 of ZeRO on every micro-step communicates, so that they spread nothing.
fn less_communication(account: &Account, compared: bool) -> String {
    let Parts { communication, optimizer, .. } = account.mean;
    let settings = &account.point.settings;
    if settings.stage() >= 2.0 {
        let group = if settings.hosts > 1 { "--shard-group node, " } else { "" };
        return format!(
            "every micro-step communicates at stage {}, so that accumulation saves nothing: {group}larger batches or --comm-dtype bf16 do",
            settings.stage()
        );
    }
    let after = |factor: f64| account.seconds - (communication + optimizer) * (1.0 - 1.0 / factor);
    let left = |factor: f64| communication / factor / after(factor);
    let factor = [2.0, 4.0, 8.0, 16.0, 32.0].into_iter().find(|f| left(*f) < WORTH).unwrap_or(64.0);
    let speed = account.seconds / after(factor);
    let efficiency = account.point.summary.as_ref().and_then(|summary| summary.efficiency.as_ref());
    let gain = match efficiency.filter(|_| compared).map(|e| e.median) {
        Some(now) => format!("would bring the efficiency from {now:.2} to {:.2}", (now * speed).min(1.0)),
        None => format!("would make it {speed:.2} times as fast"),
    };
    format!("accumulation {} {gain}", settings.accumulation as f64 * factor)
}

/// Batches with places that no image fills, and that cost as much as the others.
fn padded(account: &Account) -> Option<Found> {
    let settings = &account.point.settings;
    let steps = settings.images_per_epoch.div_ceil(settings.global_batch as u64);
    let sentence = format!(
        "too little work: {} images per epoch fill {} of {} only in part; {:.0}% of what is computed is padding",
        settings.images_per_epoch,
        counted(steps as usize, "batch"),
        settings.global_batch,
        percent(account.padding)
    );
    found(account.padding, Cause::TooLittleWork, sentence)
}

/// So few images that what a step costs anyhow is a large part of it.
fn tiny_batch(account: &Account) -> Option<Found> {
    if account.images() > TINY || account.slow_link() {
        return None;
    }
    let share = account.share(account.fixed());
    // Fixed costs are a tenth when computing takes nine times as long.
    let each = account.mean.compute / account.images() as f64;
    let enough = ((1.0 / WORTH - 1.0) * account.fixed() / each.max(1e-12)).ceil().min(1e6) as usize;
    let sentence = format!(
        "tiny batch: with {} per rank, optimizer, communication and waiting take {:.0}% of the step, {} however few they are; {} per rank would \
         bring that to {:.0}%",
        counted(account.images(), "image"),
        percent(share),
        time(account.fixed()),
        counted(enough.next_power_of_two(), "image"),
        percent(WORTH)
    );
    found(share, Cause::TinyBatch, sentence)
}

/// Steps so short that coming together takes a large part of them.
fn little_work(account: &Account) -> Option<Found> {
    if account.images() <= TINY || account.mean.compute > LITTLE || account.slow_link() {
        return None;
    }
    let share = account.share(account.fixed());
    let sentence = format!(
        "too little work: a rank computes {} per step, and communication, waiting, optimizer and idle take {} more, {:.0}% of it; a larger \
         batch or model, or fewer than {}, would use them better",
        time(account.mean.compute),
        time(account.fixed()),
        percent(share),
        counted(account.point.settings.ranks, "rank")
    );
    found(share, Cause::TooLittleWork, sentence)
}

fn optimizer(account: &Account) -> Option<Found> {
    let Parts { optimizer, .. } = account.mean;
    let share = account.share(optimizer);
    let after = account.seconds - 0.75 * optimizer;
    let sentence = format!(
        "the optimizer takes {:.0}% of the step, {}; accumulation {} would make it {:.2} times as fast",
        percent(share),
        time(optimizer),
        4 * account.point.settings.accumulation,
        account.seconds / after
    );
    found(share, Cause::Optimizer, sentence)
}

/// No rule found anything. Against the base it shows whether ranks get in each other's way.
fn computing(account: &Account, base: Option<&Account>) -> Limiter {
    let share = account.share(account.mean.compute);
    let mut sentence = format!("computing takes {:.0}% of the step", percent(share));
    let each = |a: &Account| a.mean.compute / a.images() as f64;
    match base.map(|base| (each(account) / each(base), base)) {
        Some((factor, base)) if factor > 1.0 + 0.5 * WORTH => {
            let settings = &base.point.settings;
            let than = match base.point.kind {
                Kind::Zero => format!("at stage {}", settings.stage()),
                _ => format!(
                    "over {}: ranks share memory bandwidth, caches or cores",
                    counted(settings.ranks, "rank")
                ),
            };
            sentence += &format!("; an image takes a rank {factor:.2} times as long as {than}");
        }
        _ => {
            let Parts { communication, wait, data, optimizer, idle, .. } = account.mean;
            let others = [
                ("communication", communication),
                ("waiting", wait),
                ("data", data),
                ("optimizer", optimizer),
            ];
            let others = others.into_iter().chain([("idling", idle)]);
            let worth = others.filter(|(_, seconds)| account.share(*seconds) >= WORTH);
            let worth: Vec<String> = worth
                .map(|(name, seconds)| format!("{name} {:.0}%", percent(account.share(seconds))))
                .collect();
            sentence += &match worth.is_empty() {
                true => format!(", and nothing else {:.0}% or more", percent(WORTH)),
                false => format!(", {}", worth.join(", ")),
            };
        }
    }
    plain(Cause::Compute, sentence)
}

fn percent(share: f64) -> f64 {
    100.0 * share
}

pub(crate) fn counted(n: usize, what: &str) -> String {
    let plural = if what.ends_with("ch") { "es" } else { "s" };
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}{plural}") }
}

fn time(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:.1} ms", 1e3 * seconds) } else { format!("{seconds:.1} s") }
}

fn bytes(bytes: f64) -> String {
    match bytes {
        b if b >= 1e9 => format!("{:.1} GB", b / 1e9),
        b if b >= 1e6 => format!("{:.1} MB", b / 1e6),
        b => format!("{:.0} KB", b / 1e3),
    }
}

#[cfg(test)]
mod tests;
