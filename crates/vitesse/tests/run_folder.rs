//! The folder of a run under attack: killed at every operation on its files, without room for any one of them, locked, removed,
//! damaged.

mod common;

use common::{Folder, VITESSE, text};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Output, Stdio};

/// Two steps, two checkpoints, an evaluation.
const SHORT: &str = "train --model vit-nano/8 --image-size 16 --train-samples 8 --test-samples 4 --batch-size 4 \
                     --epochs 1 --checkpoint-every 1 --threads 1 --workers 1 --no-breakdown --out run";
const LONG: &str = "train --model vit-nano/8 --train-samples 2000 --test-samples 20 --batch-size 8 \
                    --checkpoint-every 5 --threads 1 --out run";

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

fn run(folder: &Folder, line: &str, fault: &str) -> Output {
    let mut command = folder.command(VITESSE, &words(line));
    if !fault.is_empty() {
        command.env("VITESSE_FAULT", fault);
    }
    command.output().unwrap()
}

fn signal(child: &Child, signal: i32) {
    // SAFETY: a signal to a process this test started.
    unsafe { libc::kill(child.id() as i32, signal) };
}

/// Metrics that don't depend on time, and the bytes of the final weights.
fn results(folder: &Folder) -> (Vec<f64>, Vec<u8>) {
    let weights = fs::read(folder.0.join("run/weights.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(*weights.first_chunk().unwrap()) as usize;
    (folder.losses("run"), weights[header..].to_vec())
}

fn names(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).map(|entries| entries.map(|entry| entry.unwrap().file_name()).collect());
    let mut names: Vec<std::ffi::OsString> = entries.unwrap_or_default();
    names.sort();
    names.iter().map(|name| name.to_string_lossy().into_owned()).collect()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let (path, place) = (entry.as_ref().unwrap().path(), to.join(entry.unwrap().file_name()));
        if path.is_dir() {
            copy(&path, &place);
        } else {
            fs::copy(&path, &place).unwrap();
        }
    }
}

/// Returns whether a step was made, as far as the folder tells.
fn has_steps(run: &Path) -> bool {
    let lines = fs::metadata(run.join("metrics.jsonl")).is_ok_and(|about| about.len() > 0);
    lines || run.join("checkpoints").exists()
}

/// Nothing that was only made on the way is there once a run is done.
fn is_tidy(folder: &Folder) {
    for path in [&folder.0.0, &folder.0.join("run"), &folder.0.join("run/checkpoints")] {
        let left: Vec<String> = names(path).into_iter().filter(|name| name.starts_with('.')).collect();
        assert!(left.is_empty(), "{left:?} in {}", path.display());
    }
}

/// Kills a run before its first operation on files, before its second, and so on until it needs no more, in a folder that is not there
/// or one that is. Whatever it left is started again if it made no step, and gone on with in any case; the end is the same.
/// Returns how many operations there are.
fn killed_at_every_operation(name: &str, beside: Option<&str>) -> usize {
    let whole = Folder::new(&format!("{name}-whole"));
    assert!(run(&whole, SHORT, "").status.success());
    let expected = results(&whole);
    for operation in 1.. {
        let folder = Folder::new(name);
        if let Some(file) = beside {
            fs::create_dir(folder.0.join("run")).unwrap();
            fs::write(folder.0.join("run").join(file), "a user's").unwrap();
        }
        let output = run(&folder, SHORT, &format!("kill:operation={operation}"));
        if output.status.success() {
            let kept = beside.map(|file| fs::read_to_string(folder.0.join("run").join(file)).unwrap());
            assert!(kept.is_none_or(|text| text == "a user's"));
            return operation - 1;
        }
        assert_eq!(output.status.signal(), Some(libc::SIGKILL), "{}", text(&output));
        let left = folder.0.join("run");
        if beside.is_none() && left.exists() {
            for file in ["config.json", "metrics.csv", "metrics.jsonl", "run.json"] {
                assert!(left.join(file).exists(), "at {operation} the folder is there without {file}");
            }
        }
        let again = Folder::new(&format!("{name}-again"));
        copy(&folder.0, &again.0);
        let started = run(&again, SHORT, "");
        if has_steps(&left) {
            assert!(text(&started).contains("already holds a run"), "at {operation}: {}", text(&started));
        } else {
            assert!(started.status.success(), "at {operation}: {}", text(&started));
            assert!(results(&again) == expected, "started again at {operation}");
            is_tidy(&again);
        }
        let resumed = run(&folder, &format!("{SHORT} --resume=auto"), "");
        assert!(resumed.status.success(), "at {operation}: {}", text(&resumed));
        assert!(results(&folder) == expected, "gone on with at {operation}");
        is_tidy(&folder);
    }
    unreachable!("a run ends")
}

#[test]
fn killed_at_any_operation_a_run_can_be_started_or_gone_on_with() {
    let operations = killed_at_every_operation("folder-killed", None);
    println!("{operations} operations");
    assert!(operations > 40, "only {operations} were counted");
}

#[test]
fn killed_at_any_operation_in_a_folder_of_the_user() {
    killed_at_every_operation("folder-killed-beside", Some("notes.txt"));
}

/// The disk is full for one operation, whichever that is: what fails is named, and the run ends well afterwards.
#[test]
fn no_room_for_any_one_operation_costs_nothing() {
    let whole = Folder::new("folder-disk-whole");
    assert!(run(&whole, SHORT, "").status.success());
    let expected = results(&whole);
    let mut spared = 0;
    for operation in 1.. {
        let folder = Folder::new("folder-disk");
        let output = run(&folder, SHORT, &format!("disk:operation={operation}"));
        if output.status.success() {
            // There was another way (a copy for a link), or there are no more operations.
            spared += 1;
            assert!(results(&folder) == expected);
            if spared == 4 {
                break;
            }
            continue;
        }
        let said = text(&output);
        let complaints: Vec<&str> = said.lines().filter(|line| line.contains("No space left")).collect();
        assert!(!complaints.is_empty() && complaints[0].contains("run"), "at {operation}: {said}");
        let resumed = run(&folder, &format!("{SHORT} --resume=auto"), "");
        assert!(resumed.status.success(), "at {operation}: {said}{}", text(&resumed));
        assert!(results(&folder) == expected, "at {operation}");
        is_tidy(&folder);
    }
}

#[test]
fn one_process_works_in_a_folder() {
    let folder = Folder::new("folder-lock");
    let mut first = folder.start(&words(&format!("{LONG} --steps 100000")));
    folder.wait_for_step(5);
    let second = run(&folder, "train --resume run", "");
    let holder = format!("run is in use by pid {} on ", first.id());
    assert!(second.status.code() == Some(1) && text(&second).contains(&holder), "{}", text(&second));
    assert_eq!(text(&second).lines().count(), 1, "{}", text(&second));
    assert!(run(&folder, "eval --weights run", "").status.success(), "reading needs no lock");
    folder.wait_for_step(10);
    signal(&first, libc::SIGKILL);
    first.wait().unwrap();
    let steps = folder.losses("run").len() as u64;
    assert!(steps >= folder.last_step().unwrap(), "{steps} lines are left");
    // Of a process that was killed nothing holds.
    let last = folder.last_step().unwrap();
    folder.stopped_after(last + 1, &["train", "--resume", "run"]);
    // Of one elsewhere nothing is known here.
    let lock =
        r#"{"beat":"0000000007","host":"node7","pid":12,"machine":"node7 boot pid:[1]","started":"5"}"#;
    fs::write(folder.0.join("run/.lock"), lock).unwrap();
    let last = folder.last_step().unwrap();
    folder.stopped_after(last + 1, &["train", "--resume", "run", "--force"]);
    assert!(!folder.0.join("run/.lock").exists());
    assert_eq!(folder.losses("run").len() as u64, folder.last_step().unwrap(), "a line for every step");
}

#[test]
fn a_folder_that_is_removed_ends_the_run() {
    let folder = Folder::new("folder-removed");
    let child = folder.start(&words(&format!("{LONG} --steps 100000")));
    folder.wait_for_step(5);
    fs::remove_dir_all(folder.0.join("run")).or_else(|_| fs::remove_dir_all(folder.0.join("run"))).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    let said = text(&output);
    assert!(said.contains("run was removed while the run was going on"), "{said}");
    assert!(!folder.0.join("run").exists(), "half of it is there");
}

#[test]
fn damage_is_said_and_the_checkpoint_before_it_taken() {
    let folder = Folder::new("folder-damage");
    assert!(run(&folder, SHORT, "").status.success());
    let expected = results(&folder);
    let latest = folder.0.join("run/checkpoints/step-00000002.safetensors");
    let mut bytes = fs::read(&latest).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(&latest, bytes).unwrap();
    fs::remove_file(folder.0.join("run/weights.safetensors")).unwrap();
    let refused = run(&folder, "eval --weights run/checkpoints/step-00000002.safetensors", "");
    assert!(!refused.status.success() && text(&refused).contains("step-00000002.safetensors: tensor `"));
    let metrics = folder.0.join("run/metrics.jsonl");
    fs::write(&metrics, fs::read_to_string(&metrics).unwrap().replacen("{\"step\":0", "{\"step\":\"0", 1))
        .unwrap();
    let resumed = run(&folder, "train --resume run", "");
    let said = text(&resumed);
    assert!(resumed.status.success(), "{said}");
    let line = said.lines().find(|line| line.contains("step-00000002")).unwrap();
    assert!(
        line.contains("is damaged")
            && line.ends_with("going on from run/checkpoints/step-00000001.safetensors")
    );
    assert!(said.contains("metrics.jsonl is damaged: the metrics of 1 of 1 steps are lost"), "{said}");
    assert_eq!(results(&folder).1, expected.1);
    let kept = names(&folder.0.join("run/checkpoints"));
    assert!(kept.contains(&"step-00000002.safetensors.damaged".to_string()), "{kept:?}");
    assert!(kept.contains(&"step-00000002.safetensors".to_string()), "{kept:?}");
    // When none is whole, nothing begins anew over what is there.
    for name in names(&folder.0.join("run/checkpoints")) {
        fs::write(folder.0.join("run/checkpoints").join(name), "{").unwrap();
    }
    let refused = run(&folder, "train --resume run", "");
    assert!(
        refused.status.code() == Some(1) && text(&refused).contains("no other checkpoint"),
        "{}",
        text(&refused)
    );
    fs::write(folder.0.join("run/run.json"), "[{\"command\":[\"vitesse\",\"trian\"]}]").unwrap();
    let refused = run(&folder, "train --resume run", "");
    assert!(
        text(&refused).contains("run/run.json") && text(&refused).lines().count() == 1,
        "{}",
        text(&refused)
    );
}

#[test]
fn nobody_need_read_what_a_run_prints() {
    let folder = Folder::new("folder-pipe");
    let mut child = folder.start(&words(&format!("{SHORT} --log-every 1")));
    let mut first = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert!(first.contains("vit-nano/8"), "{first}");
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output));
    assert!(folder.0.join("run/weights.safetensors").exists());
    // Nobody to complain to, either.
    let mut command = folder.command(VITESSE, &words("train --resume run"));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop((child.stdout.take(), child.stderr.take()));
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_hangup_that_is_ignored_stays_so() {
    let folder = Folder::new("folder-nohup");
    let line = format!("trap '' HUP; exec {VITESSE} {LONG} --steps 40");
    let child = folder.command("sh", &["-c", &line]).spawn().unwrap();
    folder.wait_for_step(5);
    signal(&child, libc::SIGHUP);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(folder.losses("run").len(), 40);
}

#[test]
fn a_trace_that_can_t_be_written_costs_no_result() {
    let folder = Folder::new("folder-trace");
    fs::create_dir(folder.0.join("traces")).unwrap();
    let child = folder.start(&words(&format!("{LONG} --steps 60 --trace traces/t.json --trace-steps 50")));
    folder.wait_for_step(5);
    fs::remove_dir(folder.0.join("traces")).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("validation accuracy") && said.contains("weights in run/weights.safetensors"),
        "{said}"
    );
    let last = said.lines().rfind(|line| line.starts_with("vitesse: ")).unwrap_or_default();
    assert!(last.contains("traces/t.json"), "{said}");
    assert_eq!(folder.losses("run").len(), 60);
}
