//! What is lost against the base of a series, to the last percent.
//!
//! Of a point and its base, an image takes so many seconds of so many ranks; efficiency is the quotient of the two. Each is a sum over the
//! account of time, so their difference is a sum of differences, and each of these has a cause. What the account leaves open is a
//! part of its own. So the parts sum to what is missing exactly, and a sentence names as many of them as matter.

use super::{Account, counted};
use crate::results::{Cause, Kind, Lost};
use records::Parts;

/// Parts are left unnamed up to this share of all losses, or up to this share of the time.
const UNNAMED: f64 = 0.10;
const TOO_SMALL: f64 = 0.01;
/// Of the time, from which on something is lost.
const ANYTHING: f64 = 0.02;

/// Where the time of a point goes that its base does not take: shares of the point's time that sum to 1 - `efficiency`.
pub fn losses(point: &Account, base: &Account, efficiency: f64) -> Vec<Lost> {
    let (here, there) = (PerImage::of(point), PerImage::of(base));
    let each = |f: fn(&PerImage) -> f64| f(&here) - f(&there);
    let mut lost = vec![
        (Cause::Compute, (here.computing - there.computing) * there.padded),
        (Cause::TooLittleWork, here.computing * (here.padded - there.padded)),
        (Cause::Communication, each(|p| p.communication)),
        (Cause::Straggler, each(|p| p.for_one)),
        (Cause::Waiting, each(|p| p.for_any)),
        (Cause::Data, each(|p| p.data)),
        (Cause::Optimizer, each(|p| p.optimizer)),
        (Cause::Idle, each(|p| p.idle)),
    ];
    lost.iter_mut().for_each(|(_, seconds)| *seconds /= here.all);
    let explained: f64 = lost.iter().map(|(_, share)| share).sum();
    lost.push((Cause::Unexplained, 1.0 - efficiency - explained));
    lost.into_iter().map(|(cause, share)| Lost { cause, share }).collect()
}

/// Seconds of ranks that an image takes, by what they are spent on.
struct PerImage {
    /// Of a place in a batch, and how many places there are for an image.
    computing: f64,
    padded: f64,
    communication: f64,
    /// Waiting for the rank that is slowest over all steps, and what is waited beyond that.
    for_one: f64,
    for_any: f64,
    data: f64,
    optimizer: f64,
    idle: f64,
    all: f64,
}

impl PerImage {
    fn of(account: &Account) -> PerImage {
        let settings = &account.point.settings;
        let padded = 1.0 / (1.0 - account.padding).max(1e-6);
        let place = settings.ranks as f64 / settings.global_batch.max(1) as f64;
        let image = place * padded;
        let Parts { compute, communication, wait, data, optimizer, idle, .. } = account.mean;
        let for_one = account.waits_for_one();
        PerImage {
            computing: place * compute,
            padded,
            communication: image * communication,
            for_one: image * for_one,
            // A step lasts as long as the slowest rank's; others are ahead of it.
            for_any: image * (wait - for_one + account.step - account.seconds),
            data: image * data,
            optimizer: image * optimizer,
            idle: image * idle,
            all: image * account.step,
        }
    }
}

/// What is said of losses: whole percents that sum to `all`, the largest first, and those too small to be named.
#[derive(Debug, PartialEq)]
pub struct Largest {
    pub all: i64,
    pub named: Vec<(Cause, i64)>,
    pub smaller: i64,
}

/// None where nothing is lost.
pub fn largest(losses: &[Lost]) -> Option<Largest> {
    let all: f64 = losses.iter().map(|lost| lost.share).sum();
    if all.is_nan() || all < ANYTHING {
        return None;
    }
    let mut by_size: Vec<&Lost> = losses.iter().collect();
    by_size.sort_by(|a, b| b.share.abs().total_cmp(&a.share.abs()));
    let left = |named: usize| by_size[named..].iter().map(|lost| lost.share.abs()).sum::<f64>();
    let losses: f64 = losses.iter().map(|lost| lost.share.max(0.0)).sum();
    let enough = (UNNAMED * losses).max(TOO_SMALL);
    let count = (1..by_size.len()).find(|named| left(*named) <= enough).unwrap_or(by_size.len());
    let (named, smaller) = by_size.split_at(count);
    let mut shares: Vec<f64> = named.iter().map(|lost| lost.share).collect();
    shares.push(smaller.iter().map(|lost| lost.share).sum());
    let percents = whole_percents(&shares);
    let (smaller, rounded) = percents.split_last()?;
    let named = named.iter().zip(rounded).map(|(lost, percent)| (lost.cause, *percent));
    // A gain after the losses that it makes up for.
    let (mut largest, gained): (Vec<_>, Vec<_>) = named.partition(|named| named.1 >= 0);
    largest.extend(gained);
    Some(Largest { all: percents.iter().sum(), named: largest, smaller: *smaller })
}

/// Shares in whole percents that sum to their sum in whole percents: those that lose most by cutting get what is left over.
fn whole_percents(shares: &[f64]) -> Vec<i64> {
    let mut percents: Vec<i64> = shares.iter().map(|share| (100.0 * share).floor() as i64).collect();
    let all = (100.0 * shares.iter().sum::<f64>()).round() as i64;
    let mut order: Vec<usize> = (0..shares.len()).collect();
    let cut = |at: &usize| 100.0 * shares[*at] - (100.0 * shares[*at]).floor();
    order.sort_by(|a, b| cut(b).total_cmp(&cut(a)));
    let over = usize::try_from(all - percents.iter().sum::<i64>()).unwrap_or(0);
    order.into_iter().take(over).for_each(|at| percents[at] += 1);
    percents
}

/// The sentence that names the losses.
pub fn sentence(largest: &Largest, point: &Account, base: &Account, starved: bool) -> String {
    let of = |(cause, percent): &(Cause, i64)| match percent {
        0.. => format!("{percent}% {}", lost(*cause, point, base, starved)),
        _ => format!("less {}% gained by {}", -percent, gained(*cause)),
    };
    let mut parts: Vec<String> = largest.named.iter().filter(|named| named.1 != 0).map(of).collect();
    match largest.smaller {
        0 => {}
        more @ 1.. => parts.push(format!("{more}% in smaller parts")),
        less => parts.push(format!("less {}% in smaller parts", -less)),
    }
    let base = match base.point.kind {
        Kind::Zero => format!("stage {}", base.point.settings.stage()),
        _ => counted(base.point.settings.ranks, "rank"),
    };
    format!("{}% of the time is lost against {base}: {}", largest.all, parts.join(", "))
}

fn lost(cause: Cause, point: &Account, base: &Account, starved: bool) -> String {
    match cause {
        Cause::Compute => {
            let factor = PerImage::of(point).computing / PerImage::of(base).computing;
            let fewer = point.point.settings.batch_per_rank < base.point.settings.batch_per_rank;
            let shared = match point.point.settings.device.as_str() {
                "cpu" if starved => Some("other programs use the cores"),
                // The base is over as many ranks, which share as much.
                _ if point.point.kind == Kind::Zero => None,
                "cpu" => Some("ranks share memory bandwidth, caches or cores"),
                _ => Some("ranks share power, memory bandwidth or a GPU"),
            };
            let why: Vec<&str> =
                fewer.then_some("fewer images at a time").into_iter().chain(shared).collect();
            let why = if why.is_empty() { String::new() } else { format!(": {}", why.join(", or ")) };
            format!("slower computing (an image takes a rank {factor:.2} times as long{why})")
        }
        Cause::TooLittleWork => "places in batches that no image fills".into(),
        Cause::Communication => "communication that nothing hides".into(),
        Cause::Straggler => match point.slowest() {
            Some(slowest) if slowest.late => {
                format!("waiting for rank {}, whose images come late", slowest.rank)
            }
            Some(slowest) => {
                format!("waiting for rank {}, which is {:.1}× slower", slowest.rank, slowest.slower)
            }
            None => "waiting for the slowest rank".into(),
        },
        Cause::Waiting => "waiting for whoever is slowest in a step, a different rank each time".into(),
        Cause::Data => "waiting for images".into(),
        Cause::Optimizer => "the optimizer's update".into(),
        Cause::Idle => "idle between pieces of work".into(),
        Cause::Unexplained => "that the account of time does not explain".into(),
        Cause::TinyBatch | Cause::Oversubscribed => "shared cores".into(),
    }
}

fn gained(cause: Cause) -> &'static str {
    match cause {
        Cause::Compute => "faster computing",
        Cause::TooLittleWork => "fuller batches",
        Cause::Communication => "less communication",
        Cause::Straggler | Cause::Waiting => "less waiting for other ranks",
        Cause::Data => "less waiting for images",
        Cause::Optimizer => "shorter updates",
        Cause::Idle => "less idling",
        _ => "what the account of time does not explain",
    }
}
