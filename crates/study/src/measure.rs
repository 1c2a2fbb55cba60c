//! From what a run wrote to what it measured.

use crate::grid::Planned;
use crate::lines::{Line, RankLine, read_lines};
use crate::results::{Epoch, Measured, Parts};
use serde::Deserialize;
use std::path::Path;

/// What `vitesse train --json` says at its end, as far as it is needed.
#[derive(Deserialize)]
struct End {
    stopped: Option<String>,
    #[serde(default)]
    exchanged: Vec<Exchanged>,
}

#[derive(Deserialize)]
struct Exchanged {
    bytes: u64,
    times: u64,
    seconds: f64,
}

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
    let lines: Vec<Line> = read_lines(&folder.join("metrics.jsonl"))?;
    let end = end.lines().rev().find(|line| line.starts_with('{'));
    let end: End = end
        .and_then(|line| serde_json::from_str(line).ok())
        .ok_or("the run printed no summary at its end".to_string())?;
    if let Some(why) = end.stopped {
        return Err(format!("the run was stopped by {why}"));
    }
    let steps: Vec<&Line> = lines.iter().filter(|line| line.seconds.is_some()).collect();
    if steps.len() as u64 != planned.settings.steps {
        return Err(format!("the run made {} steps of {}", steps.len(), planned.settings.steps));
    }
    let counted: Vec<&Line> = steps.iter().copied().filter(|line| line.step >= planned.warmup).collect();
    let step_seconds: Vec<f64> = counted.iter().filter_map(|line| line.seconds).collect();
    let total: f64 = step_seconds.iter().sum();
    let images: f64 = counted.iter().map(|line| line.images().round()).sum();
    let ranks = match planned.settings.ranks {
        1 => vec![mean(&counted.iter().filter_map(|line| line.parts()).collect::<Vec<_>>())],
        n => of_ranks(read_lines(&folder.join("ranks.jsonl"))?, n, planned.warmup)?,
    };
    let worked: Option<f64> = counted.iter().map(|line| line.cpu_seconds).sum();
    let all = |f: fn(&Exchanged) -> f64| end.exchanged.iter().map(f).sum::<f64>();
    let made = steps.len() as f64;
    let (carried, carrying) = (all(|e| (e.bytes * e.times) as f64), all(|e| e.seconds));
    let computing = |parts: &Parts| (parts.compute + parts.optimizer) / parts.seconds();
    let on_gpu = planned.settings.device != "cpu";
    let told = |f: fn(&Line) -> Option<f64>| {
        let told: Vec<f64> = counted.iter().filter_map(|line| f(line)).filter(|x| x.is_finite()).collect();
        (!told.is_empty()).then_some(told)
    };
    let average = |told: Vec<f64>| told.iter().sum::<f64>() / told.len() as f64;
    let gpu_memory = told(|line| line.gpu_memory_used).map(|told| told.into_iter().fold(0.0, f64::max));
    Ok(Measured {
        epoch_seconds: epochs(&counted, planned),
        images_per_second: images / total,
        images: images as u64,
        exchange_bytes: (carried / made).round() as u64,
        exchange_bytes_per_second: if carrying > 0.0 { carried / carrying } else { 0.0 },
        cpu_utilisation: worked.map(|worked| worked / (total * (cores * planned.settings.hosts) as f64)),
        gpu_utilisation: on_gpu.then(|| ranks.iter().map(computing).sum::<f64>() / ranks.len() as f64),
        memory_bytes: watched.memory_bytes,
        gpu_memory_bytes: gpu_memory.map(|bytes| bytes as u64),
        gpu_load: told(|line| line.gpu_load).map(average),
        gpu_watts: told(|line| line.gpu_power).map(average),
        watts: watched.watts,
        curve: curve(&lines),
        step_seconds,
        ranks,
    })
}

fn of_ranks(lines: Vec<RankLine>, ranks: usize, warmup: u64) -> Result<Vec<Parts>, String> {
    let mut of = vec![Vec::new(); ranks];
    for line in lines.into_iter().filter(|line| line.step >= warmup) {
        let rank = line.rank;
        let mine = of.get_mut(rank).ok_or(format!("ranks.jsonl tells of a rank {rank} among {ranks}"))?;
        mine.push(line.parts());
    }
    match of.iter().position(Vec::is_empty) {
        Some(rank) => Err(format!("ranks.jsonl has nothing of rank {rank}")),
        None => Ok(of.iter().map(|parts| mean(parts)).collect()),
    }
}

pub(crate) fn mean(parts: &[Parts]) -> Parts {
    let each = |f: fn(&Parts) -> f64| parts.iter().map(f).sum::<f64>() / parts.len().max(1) as f64;
    Parts {
        compute: each(|p| p.compute),
        exchange: each(|p| p.exchange),
        wait: each(|p| p.wait),
        data: each(|p| p.data),
        optimizer: each(|p| p.optimizer),
        idle: each(|p| p.idle),
        hidden: each(|p| p.hidden),
    }
}

/// Each epoch's mean step, times the steps of an epoch. One that was all warm-up is left out.
fn epochs(counted: &[&Line], planned: &Planned) -> Vec<f64> {
    let settings = &planned.settings;
    let steps = settings.images_per_epoch.div_ceil(settings.global_batch as u64) as f64;
    let last = counted.last().map_or(0, |line| line.epoch);
    let of =
        |epoch: u64| counted.iter().filter(move |line| line.epoch == epoch).filter_map(|line| line.seconds);
    let mean = |epoch| of(epoch).sum::<f64>() / of(epoch).count() as f64;
    (0..=last).map(|epoch| mean(epoch) * steps).filter(|seconds| seconds.is_finite()).collect()
}

/// Losses and hits of the steps of each epoch, weighted by their images, and the evaluation after it.
fn curve(lines: &[Line]) -> Vec<Epoch> {
    let last = lines.last().map_or(0, |line| line.epoch);
    let of = |epoch: u64| lines.iter().filter(move |line| line.epoch == epoch);
    let weighted = |epoch, f: fn(&Line) -> Option<f64>| {
        let sums = of(epoch).filter_map(|line| Some((f(line)? * line.images(), line.images())));
        let (sum, images) = sums.fold((0.0, 0.0), |(a, b), (x, n)| (a + x, b + n));
        (images > 0.0).then_some(sum / images)
    };
    let judged = |epoch, f: fn(&Line) -> Option<f64>| of(epoch).filter_map(f).next_back();
    let one = |epoch| Epoch {
        epoch,
        loss: weighted(epoch, |line| line.loss),
        top1: weighted(epoch, |line| line.top1),
        eval_loss: judged(epoch, |line| line.eval_loss),
        eval_top1: judged(epoch, |line| line.eval_top1),
        eval_miou: judged(epoch, |line| line.eval_miou),
        eval_pixel_accuracy: judged(epoch, |line| line.eval_pixel_accuracy),
    };
    (0..=last).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{planned, point};
    use std::fs;
    use std::path::PathBuf;

    /// Two ranks, two epochs of three steps of 8 images, the last of an epoch half full; the first two steps are warm-up.
    fn run(name: &str) -> (PathBuf, Planned) {
        let folder = std::env::temp_dir().join(format!("vitesse-measure-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
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
        assert_eq!((m.exchange_bytes, m.exchange_bytes_per_second.round()), (120, 1000.0));
        assert_eq!((m.ranks[1].compute, m.ranks[1].exchange, m.memory_bytes), (3.5, 1.0, Some(7)));
        // Losses 0, 1 and 2 with 8, 8 and 4 images.
        let first = m.curve[0];
        assert!(
            (first.loss.unwrap() - 0.8).abs() < 1e-6 && first.eval_pixel_accuracy == Some(0.75),
            "{first:?}"
        );
        assert_eq!(first.score(), Some(("mean IoU, held out", 0.25)));
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
