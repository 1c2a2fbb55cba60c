//! From what a run wrote to what it measured.

use crate::grid::Planned;
use crate::results::{Epoch, Measured, OfKind};
use records::{Collective, METRICS, Metric, MetricsLine, Over, Parts, RankLine, Summary, read_lines};
use std::collections::BTreeMap;
use std::path::Path;

/// Of the machine, while the run went on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Watched {
    pub memory_bytes: Option<u64>,
    pub watts: Option<f64>,
}

/// Reads what a run left in its folder, and the words it ended with.
pub fn measured(
    folder: &Path,
    end: &str,
    planned: &Planned,
    cores: usize,
    watched: Watched,
) -> Result<Measured, String> {
    let lines: Vec<MetricsLine> = read_lines(&folder.join("metrics.jsonl"))?;
    let end = end.lines().rev().find(|line| line.starts_with('{'));
    let end: Summary = end
        .and_then(|line| serde_json::from_str(line).ok())
        .ok_or("the run printed no summary at its end".to_string())?;
    if let Some(why) = end.stopped {
        return Err(format!("the run was stopped by {why}"));
    }
    let steps: Vec<&MetricsLine> = lines.iter().filter(|line| line.get(Metric::Seconds).is_some()).collect();
    if steps.len() as u64 != planned.settings.steps {
        return Err(format!("the run made {} steps of {}", steps.len(), planned.settings.steps));
    }
    let counted: Vec<&MetricsLine> =
        steps.iter().copied().filter(|line| line.step >= planned.warmup).collect();
    let step_seconds: Vec<f64> = counted.iter().filter_map(|line| line.get(Metric::Seconds)).collect();
    let total: f64 = step_seconds.iter().sum();
    let images: f64 = counted.iter().map(|line| line.images().round()).sum();
    let (ranks, slowest_steps) = match planned.settings.ranks {
        1 => {
            let parts: Vec<Parts> = counted.iter().filter_map(|line| line.parts()).collect();
            (vec![Parts::mean(&parts)], vec![])
        }
        n => of_ranks(read_lines(&folder.join("ranks.jsonl"))?, n, planned.warmup)?,
    };
    let worked: Option<f64> = counted.iter().map(|line| line.get(Metric::CpuSeconds)).sum();
    let made = steps.len() as f64;
    let sent: f64 = end.collectives.iter().map(|all| all.bytes as f64 * all.times as f64).sum();
    let sending: f64 = end.collectives.iter().map(|all| all.seconds).sum();
    let computing = |parts: &Parts| (parts.compute + parts.optimizer) / parts.wall();
    let on_gpu = planned.settings.device != "cpu";
    let known = |metric| {
        let known: Vec<f64> =
            counted.iter().filter_map(|line| line.get(metric)).filter(|x| x.is_finite()).collect();
        (!known.is_empty()).then_some(known)
    };
    let average = |known: Vec<f64>| known.iter().sum::<f64>() / known.len() as f64;
    let gpu_memory = known(Metric::GpuMemoryUsed).map(|known| known.into_iter().fold(0.0, f64::max));
    Ok(Measured {
        epoch_seconds: epochs(&counted, planned),
        images_per_second: images / total,
        images: images as u64,
        communication_bytes: (sent / made).round() as u64,
        communication_bytes_per_second: if sending > 0.0 { sent / sending } else { 0.0 },
        cpu_utilisation: worked.map(|worked| worked / (total * (cores * planned.settings.hosts) as f64)),
        gpu_utilisation: on_gpu.then(|| ranks.iter().map(computing).sum::<f64>() / ranks.len() as f64),
        memory_bytes: watched.memory_bytes,
        planned_bytes: end.memory_bytes,
        collectives: of_kinds(&end.collectives, made),
        gpu_memory_bytes: gpu_memory.map(|bytes| bytes as u64),
        gpu_load: known(Metric::GpuLoad).map(average),
        gpu_watts: known(Metric::GpuPower).map(average),
        watts: watched.watts,
        curve: curve(&lines),
        step_seconds,
        ranks,
        slowest_steps,
    })
}

/// Collectives by kind, in a mean step.
fn of_kinds(all: &[Collective], steps: f64) -> Vec<OfKind> {
    let mut kinds: Vec<OfKind> = vec![];
    for one in all.iter().filter(|one| !one.kind.is_empty()) {
        let bytes = one.bytes as f64 * one.times as f64;
        let sum = OfKind { kind: one.kind.clone(), bytes, seconds: one.seconds, exposed: one.exposed };
        let part = sum.scaled(1.0 / steps);
        match kinds.iter_mut().find(|known| known.kind == one.kind) {
            Some(known) => *known = known.plus(&part),
            None => kinds.push(part),
        }
    }
    kinds
}

/// The mean step of each rank, and the steps in which each was the slowest by its own work.
fn of_ranks(lines: Vec<RankLine>, ranks: usize, warmup: u64) -> Result<(Vec<Parts>, Vec<u64>), String> {
    let mut of = vec![Vec::new(); ranks];
    let mut slowest: BTreeMap<u64, (f64, usize)> = BTreeMap::new();
    for line in lines.into_iter().filter(|line| line.step >= warmup) {
        let rank = line.rank;
        let mine =
            of.get_mut(rank).ok_or(format!("ranks.jsonl has lines of rank {rank}, but there are {ranks}"))?;
        mine.push(line.parts);
        let last = slowest.entry(line.step).or_insert((f64::NEG_INFINITY, rank));
        if line.parts.own() > last.0 {
            *last = (line.parts.own(), rank);
        }
    }
    let mut steps = vec![0; ranks];
    slowest.into_values().for_each(|(_, rank)| steps[rank] += 1);
    match of.iter().position(Vec::is_empty) {
        Some(rank) => Err(format!("ranks.jsonl has nothing of rank {rank}")),
        None => Ok((of.iter().map(|parts| Parts::mean(parts)).collect(), steps)),
    }
}

/// Each epoch's mean step, times the steps of an epoch. One that was all warm-up is left out.
fn epochs(counted: &[&MetricsLine], planned: &Planned) -> Vec<f64> {
    let settings = &planned.settings;
    let steps = settings.images_per_epoch.div_ceil(settings.global_batch as u64) as f64;
    let last = counted.last().map_or(0, |line| line.epoch);
    let of = |epoch: u64| {
        counted.iter().filter(move |line| line.epoch == epoch).filter_map(|line| line.get(Metric::Seconds))
    };
    let mean = |epoch| of(epoch).sum::<f64>() / of(epoch).count() as f64;
    (0..=last).map(|epoch| mean(epoch) * steps).filter(|seconds| seconds.is_finite()).collect()
}

/// The metrics of each epoch, aggregated as they are declared to be.
fn curve(lines: &[MetricsLine]) -> Vec<Epoch> {
    let last = lines.last().map_or(0, |line| line.epoch);
    let of = |epoch: u64| lines.iter().filter(move |line| line.epoch == epoch);
    let known = |epoch, metric| of(epoch).filter_map(move |line| Some((line.get(metric)?, line.images())));
    let one = |epoch| {
        let mut one = Epoch { epoch, ..Epoch::default() };
        for declared in METRICS {
            let mut values = known(epoch, declared.metric);
            let value = match declared.over {
                Some(Over::Images) => {
                    let (sum, images) = values.fold((0.0, 0.0), |(sum, all), (x, n)| (sum + x * n, all + n));
                    (images > 0.0).then_some(sum / images)
                }
                Some(Over::Last) => values.next_back().map(|(x, _)| x),
                Some(Over::Most) => values.map(|(x, _)| x).max_by(f64::total_cmp),
                None => None,
            };
            one.values.set(declared.metric, value);
        }
        one
    };
    (0..=last).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{planned, point};
    use ::testing::Folder;
    use std::fs;

    /// Two ranks, two epochs of three steps of 8 images, the last of an epoch half full; the first two steps are warm-up.
    fn run(name: &str) -> (Folder, Planned) {
        let folder = Folder::new(&format!("measure-{name}"));
        let (mut metrics, mut ranks) = (String::new(), String::new());
        for step in 0..6u64 {
            let (seconds, images) =
                (if step < 2 { 9.0 } else { step as f64 }, if step % 3 == 2 { 4.0 } else { 8.0 });
            metrics += &format!(
                "{{\"step\":{step},\"epoch\":{},\"loss\":{step},\"top1\":0.5,\"images_per_second\":{:.6},\"seconds\":{seconds},\
                 \"cpu_seconds\":{seconds},\"gpu_load\":0.5,\"gpu_memory_used\":{step}e3,\"gpu_power\":{step}}}\n",
                step / 3,
                images / seconds
            );
            for rank in 0..2 {
                ranks += &format!(
                    "{{\"step\":{step},\"rank\":{rank},\"seconds\":{seconds},\"compute\":{seconds},\"exchange\":{rank},\"wait\":0,\
                     \"data\":0,\"optimizer\":0,\"idle\":0,\"hidden_exchange\":0}}\n"
                );
            }
            if step % 3 == 2 {
                metrics += &format!(
                    "{{\"step\":{step},\"epoch\":{},\"eval_loss\":1.5,\"eval_miou\":0.25,\"eval_pixel_accuracy\":0.75}}\n",
                    step / 3
                );
            }
        }
        fs::write(folder.join("metrics.jsonl"), metrics + "{\"step\":9,\"cut").unwrap();
        fs::write(folder.join("ranks.jsonl"), ranks).unwrap();
        let mut settings = point(2, &[]).settings;
        (settings.images_per_epoch, settings.global_batch, settings.steps) = (20, 8, 6);
        (folder, Planned { warmup: 2, ..planned("p", settings) })
    }

    const END: &str = "hello\n{\"stopped\":null,\"exchanged\":[{\"layer\":\"a\",\"bytes\":100,\"times\":6,\"seconds\":0.5},\
                       {\"layer\":\"b\",\"bytes\":20,\"times\":6,\"seconds\":0.22}]}\n";

    #[test]
    fn what_a_run_wrote_by_hand() {
        let (folder, planned) = run("whole");
        let watched = Watched { memory_bytes: Some(7), watts: None };
        let m = measured(&folder, END, &planned, 4, watched).unwrap();
        assert_eq!(m.step_seconds, [2.0, 3.0, 4.0, 5.0]);
        // Three steps an epoch: one of 2 s counts in the first, 3, 4 and 5 s in the second.
        assert_eq!(m.epoch_seconds, [6.0, 12.0]);
        assert_eq!(m.images, 4 + 8 + 8 + 4);
        assert!((m.images_per_second - 24.0 / 14.0).abs() < 1e-9);
        assert_eq!(m.cpu_utilisation, Some(0.25), "one core of four");
        assert_eq!((m.communication_bytes, m.communication_bytes_per_second.round()), (120, 1000.0));
        assert_eq!((m.ranks[1].compute, m.ranks[1].communication, m.memory_bytes), (3.5, 1.0, Some(7)));
        // Losses 0, 1 and 2 with 8, 8 and 4 images.
        let first = m.curve[0];
        assert!(
            (first.get(Metric::Loss).unwrap() - 0.8).abs() < 1e-6
                && first.get(Metric::EvalPixelAccuracy) == Some(0.75),
            "{first:?}"
        );
        assert_eq!(first.score(), Some(("validation mean IoU", 0.25)));
        // Of steps 2 to 5, what the GPU's sensors said.
        assert_eq!((m.gpu_memory_bytes, m.gpu_load, m.gpu_watts), (Some(5000), Some(0.5), Some(3.5)));
        assert_eq!(m.curve.len(), 2);
    }

    #[test]
    fn a_run_that_is_not_whole_is_none() {
        let (folder, planned) = run("part");
        let watched = Watched::default();
        let refused = |end: &str, planned: &Planned| measured(&folder, end, planned, 4, watched).unwrap_err();
        assert!(refused("", &planned).contains("no summary"));
        assert!(refused("{\"stopped\":\"Ctrl-C\"}", &planned).contains("stopped by Ctrl-C"));
        let mut longer = planned.clone();
        longer.settings.steps = 7;
        assert!(refused(END, &longer).contains("6 steps of 7"));
        fs::remove_file(folder.join("ranks.jsonl")).unwrap();
        assert!(refused(END, &planned).contains("ranks.jsonl"));
    }
}
