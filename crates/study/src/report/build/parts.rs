//! Where the time went.

use super::{Study, key};
use crate::report::chart::{Row, Rows};
use crate::report::figure::{Chart, Figure, Key, Panel};
use crate::report::numbers::{percent, seconds};
use crate::report::points;
use crate::report::scene::Ink;
use records::{PARTS, Parts};

/// The parts that sum to a step, with their colours and seconds, in the order in which they are drawn.
pub fn named(parts: &Parts) -> [(&'static str, Ink, f64); 6] {
    let inks = [Ink::Compute, Ink::Communication, Ink::Wait, Ink::Data, Ink::Optimizer, Ink::Idle];
    std::array::from_fn(|i| (PARTS[i].name, inks[i], (PARTS[i].of)(parts)))
}

pub fn legend() -> Vec<Key> {
    named(&Parts::default()).map(|(name, ink, _)| key(ink, name)).to_vec()
}

/// A row of shares; none if there is nothing to divide.
pub fn row(label: String, heading: &str, parts: &Parts, pale: bool, note: String) -> Option<Row> {
    let wall = parts.wall();
    if !(wall.is_finite() && wall > 0.0) {
        return None;
    }
    let shares = named(parts).map(|(name, ink, seconds)| (name, ink, seconds / wall)).to_vec();
    let mut tip = vec![format!("{heading}\n{} per step", seconds(wall))];
    let told = named(parts).into_iter().filter(|part| part.2 / wall >= 0.0005);
    tip.extend(told.map(|(name, _, time)| format!("{name}: {} ({})", seconds(time), percent(time / wall))));
    if parts.hidden > 0.0 {
        tip.push(format!("hidden communication: {}", seconds(parts.hidden)));
    }
    if !note.is_empty() {
        tip.push(note.clone());
    }
    Some(Row { label, parts: shares, pale, tip: tip.join("\n"), note })
}

pub fn by_point(study: &Study) -> Option<Figure> {
    let mut panels = vec![];
    for group in &study.groups {
        let rows: Vec<Row> = group
            .points
            .iter()
            .filter_map(|point| {
                let (name, summary) = (points::described(point, group), point.summary.as_ref()?);
                let label = format!("{name}{}", points::signs(point));
                let note = points::flags(point).join("; ");
                row(label, &name, &summary.parts, points::oversubscribed(point), note)
            })
            .collect();
        if !rows.is_empty() {
            panels.push(Panel { title: group.title(study.platforms), chart: Chart::Rows(Rows { rows }) });
        }
    }
    let note = format!(
        "Shares of a mean step, over all ranks. Hidden communication is part of the others.{}",
        study.signs()
    );
    figure(study, "parts", "where the time went", note, panels)
}

/// Ranks of the largest point of every group, where there are several.
pub fn by_rank(study: &Study) -> Option<Figure> {
    let mut panels = vec![];
    for group in &study.groups {
        let runs = group.points.iter().filter_map(|point| {
            let (_, measured) = points::measured(point).next()?;
            (measured.ranks.len() > 1).then_some((point, measured))
        });
        // Where a point has enough cores, it tells more.
        let best =
            runs.max_by_key(|(point, measured)| (!points::oversubscribed(point), measured.ranks.len()));
        let Some((point, measured)) = best else { continue };
        let rows = told(&measured.ranks).into_iter().filter_map(|rank| {
            let parts = &measured.ranks[rank];
            let label = format!("rank {rank}");
            row(label.clone(), &label, parts, false, String::new())
        });
        let rows: Vec<Row> = rows.collect();
        let parts = [group.title(study.platforms), points::described(point, group) + &points::signs(point)];
        let title = parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" · ");
        if !rows.is_empty() {
            panels.push(Panel { title, chart: Chart::Rows(Rows { rows }) });
        }
    }
    let ranks = study.groups.iter().flat_map(|group| &group.points).map(|point| point.settings.ranks);
    let some = match ranks.max() {
        Some(most) if most > ALL => {
            format!(" Of more than {ALL} ranks, the {SLOWEST} slowest and the {FASTEST} fastest.")
        }
        _ => String::new(),
    };
    let note = format!(
        "Shares of a mean step of each rank, in the first run of the point with the most ranks. A rank that computes while the others \
         wait is the slow one.{some}"
    );
    figure(study, "ranks", "rank by rank", note, panels)
}

/// Ranks up to which each has a row; of more, only the slowest and the fastest by their own work.
const ALL: usize = 16;
const SLOWEST: usize = 6;
const FASTEST: usize = 2;

fn told(ranks: &[Parts]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..ranks.len()).collect();
    if ranks.len() > ALL {
        order.sort_by(|a, b| ranks[*b].own().total_cmp(&ranks[*a].own()));
        order.drain(SLOWEST..ranks.len() - FASTEST);
        order.sort_unstable();
    }
    order
}

fn figure(study: &Study, id: &str, title: &str, note: String, panels: Vec<Panel>) -> Option<Figure> {
    let figure = study.figure(id, title, note, legend(), panels);
    (!figure.panels.is_empty()).then_some(figure)
}
