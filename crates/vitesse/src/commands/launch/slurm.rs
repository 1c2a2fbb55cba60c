//! A script for `sbatch`.

use super::{is_plain, train, train_args};
use crate::args::launch::LaunchArgs;
use anyhow::{Context, bail, ensure};
use config::Raw;
use signal_hook::consts::SIGUSR1;
use std::fmt::Write as _;

/// Most seconds that a run has to save before its limit of time.
const SAVE_SECONDS: u64 = 120;

pub fn sbatch(args: &LaunchArgs) -> anyhow::Result<String> {
    let goes_on = goes_on(&train_args(args)?);
    let mut script = "#!/bin/bash\n".to_string();
    for setting in settings(args)? {
        writeln!(script, "#SBATCH --{setting}")?;
    }
    if goes_on.is_some() {
        let seconds = match &args.time {
            Some(time) => limit(time)?.map_or(SAVE_SECONDS, |limit| SAVE_SECONDS.min(limit / 2)),
            None => SAVE_SECONDS,
        };
        writeln!(
            script,
            "# The run saves before its limit of time, and this script queues it again to go on."
        )?;
        writeln!(script, "#SBATCH --signal=USR1@{seconds}")?;
        writeln!(script, "#SBATCH --requeue")?;
        writeln!(script, "#SBATCH --open-mode=append")?;
    }
    writeln!(script)?;
    writeln!(script, "set -eu")?;
    writeln!(script, "MASTER_ADDR=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)")?;
    writeln!(script, "MASTER_PORT=$((15000 + SLURM_JOB_ID % 16000))")?;
    writeln!(script, "export MASTER_ADDR MASTER_PORT")?;
    let cores = args.cpus_per_rank.map(|cores| format!(" --cpus-per-task={cores}")).unwrap_or_default();
    let start = format!("srun --kill-on-bad-exit=1{cores} {}", train(args));
    let Some(resume) = goes_on else {
        writeln!(script, "{start}")?;
        return Ok(script);
    };
    writeln!(script, "code=0")?;
    writeln!(script, "{start}{resume} || code=$?")?;
    writeln!(script, "# {}: stopped by SIGUSR1, and saved.", 128 + SIGUSR1)?;
    writeln!(script, "if [ \"$code\" = {} ]; then", 128 + SIGUSR1)?;
    writeln!(script, "    scontrol requeue \"$SLURM_JOB_ID\"")?;
    writeln!(script, "fi")?;
    writeln!(script, "exit \"$code\"")?;
    Ok(script)
}

/// What is asked of Slurm.
fn settings(args: &LaunchArgs) -> anyhow::Result<Vec<String>> {
    let mut settings = vec![
        "job-name=vitesse".to_string(),
        format!("nodes={}", args.nodes),
        format!("ntasks-per-node={}", args.per_node),
    ];
    settings.extend(args.cpus_per_rank.map(|cores| format!("cpus-per-task={cores}")));
    settings.extend(args.gpus.then(|| format!("gpus-per-node={}", args.per_node)));
    for (flag, value) in [("time", &args.time), ("partition", &args.partition)] {
        let Some(value) = value else { continue };
        ensure!(is_plain(value), "--{flag} '{value}' is nothing that sbatch takes");
        settings.push(format!("{flag}={value}"));
    }
    if !args.hosts.is_empty() {
        settings.push(format!("nodelist={}", args.hosts.join(",")));
    }
    Ok(settings)
}

/// What a second start needs to go on with what the first left; nothing if a run leaves nothing.
fn goes_on(train: &Raw) -> Option<&'static str> {
    match (&train.out, &train.resume) {
        (_, Some(_)) => Some(""),
        (Some(_), None) => Some(" --resume=auto"),
        (None, None) => None,
    }
}

/// Seconds of a limit of time as sbatch takes it: `minutes[:seconds]`, `hours:minutes:seconds` or `days-hours[:minutes[:seconds]]`.
/// Nothing for no limit.
fn limit(time: &str) -> anyhow::Result<Option<u64>> {
    if ["infinite", "unlimited", "0", "-1"].iter().any(|none| time.eq_ignore_ascii_case(none)) {
        return Ok(None);
    }
    let (days, rest) = time.split_once('-').map_or((None, time), |(days, rest)| (Some(days), rest));
    let units: &[u64] = match (days, rest.split(':').count()) {
        (Some(_), 1..=3) | (None, 3) => &[3600, 60, 1],
        (None, 1..=2) => &[60, 1],
        _ => bail!("{}", unknown(time)),
    };
    let mut parts =
        days.map(|days| (days, 86_400)).into_iter().chain(rest.split(':').zip(units.iter().copied()));
    let seconds = parts.try_fold(0u64, |sum, (number, unit)| {
        sum.checked_add(number.parse::<u64>().ok()?.checked_mul(unit)?)
    });
    seconds.filter(|seconds| *seconds > 0).map(Some).with_context(|| unknown(time))
}

fn unknown(time: &str) -> String {
    format!("--time '{time}' is nothing that sbatch takes: minutes, hours:minutes:seconds or days-hours")
}

#[cfg(test)]
mod tests {
    use super::super::tests::{TRAIN, is_valid, text, words};
    use super::*;

    #[test]
    fn an_sbatch_script_asks_for_what_was_asked_and_saves_in_time() {
        let line = [
            &["--with", "slurm", "--nodes", "2", "--per-node", "4", "--gpus", "--cpus-per-rank", "8"][..],
            &["--time", "1-12:00:00", "--partition", "gpu"],
            &TRAIN,
        ];
        let script = text(&line.concat()).unwrap();
        is_valid(&script);
        for setting in [
            "nodes=2",
            "ntasks-per-node=4",
            "cpus-per-task=8",
            "gpus-per-node=4",
            "time=1-12:00:00",
            "partition=gpu",
            "signal=USR1@120",
            "requeue",
            "open-mode=append",
        ] {
            assert!(script.contains(&format!("\n#SBATCH --{setting}\n")), "{setting}: {script}");
        }
        let first_command =
            script.lines().position(|line| !line.starts_with('#') && !line.is_empty()).unwrap();
        let last_setting = script.lines().rev().position(|line| line.starts_with("#SBATCH")).unwrap();
        assert!(
            script.lines().count() - last_setting <= first_command,
            "sbatch reads no settings after a command"
        );
        let setup = "scontrol() { printf 'n1\\nn2\\n'; }\nSLURM_JOB_NODELIST=n[1-2] SLURM_JOB_ID=1600007\n\
                     trap 'echo $MASTER_ADDR $MASTER_PORT' EXIT";
        let said = words(&script, "srun", setup);
        assert_eq!(said.last().unwrap(), "n1 15007");
        assert_eq!(said[..2], ["--kill-on-bad-exit=1", "--cpus-per-task=8"]);
        assert_eq!(said[3..said.len() - 1], [&["train"], &TRAIN[1..], &["--resume=auto"]].concat()[..]);
    }

    #[test]
    fn a_run_that_was_stopped_in_time_is_queued_again_and_no_other() {
        let script = text(&["--with", "slurm", "--", "--out", "runs/a"]).unwrap();
        is_valid(&script);
        // Bash counts what srun returns, and scontrol says what it was told.
        let ends = |code: i32| {
            let setup = format!(
                "SLURM_JOB_NODELIST=n1 SLURM_JOB_ID=7\nscontrol() {{ [ $1 != requeue ] || echo \"requeue $2\"; }}\n\
                 srun() {{ return {code}; }}\ntrap 'echo ended $?; exit 0' EXIT"
            );
            words(&script, "nothing", &setup).join(", ")
        };
        assert_eq!(ends(138), "requeue 7, ended 138");
        for code in [0, 1, 3, 137, 143] {
            assert_eq!(ends(code), format!("ended {code}"));
        }
    }

    #[test]
    fn a_run_that_leaves_nothing_is_neither_stopped_early_nor_queued_again() {
        let script = text(&["--with", "slurm", "--", "--steps", "3"]).unwrap();
        assert!(!["USR1", "requeue", "resume"].iter().any(|word| script.contains(word)), "{script}");
        let resumed = text(&["--with", "slurm", "--", "--resume", "runs/a"]).unwrap();
        assert!(resumed.contains("scontrol requeue") && !resumed.contains("--resume=auto"), "{resumed}");
    }

    #[test]
    fn limits_of_time_are_read_as_sbatch_reads_them() {
        let seconds = |time| limit(time).unwrap_or_else(|error| panic!("{error}"));
        let known = [
            ("90", 5400),
            ("2:30", 150),
            ("1:02:03", 3723),
            ("1-0", 86_400),
            ("1-12:30", 131_400),
            ("0-0:1:1", 61),
        ];
        for (time, expected) in known {
            assert_eq!(seconds(time), Some(expected), "{time}");
        }
        for none in ["infinite", "UNLIMITED", "0"] {
            assert_eq!(seconds(none), None);
        }
        for wrong in ["", "x", "1:2:3:4", "1-2:3:4:5", "12h", "1-", ":", "00:00", "99999999999999999999"] {
            let error = limit(wrong).expect_err(wrong).to_string();
            assert!(error.starts_with("--time '") && !error.contains('\n'), "{error}");
        }
        let signal = |time: &str| {
            let script = text(&["--with", "slurm", "--time", time, "--", "--out", "a"]).unwrap();
            script
                .lines()
                .find_map(|line| line.strip_prefix("#SBATCH --signal=USR1@").map(str::to_string))
                .unwrap()
        };
        assert_eq!((signal("1-0"), signal("2:00"), signal("1")), ("120".into(), "60".into(), "30".into()));
    }
}
