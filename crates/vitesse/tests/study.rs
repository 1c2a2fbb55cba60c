//! Studies from their plan to their results, of tiny models: what is measured, what survives a kill, what is refused.

mod common;

use common::{Folder, VITESSE, text};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

/// Two points of a model that trains in milliseconds.
const TINY: &str = "study strong --ranks 1,2 --threads 1 --oversubscribe --model vit-nano/8 --batch-sizes 8 --steps 6 --warmup 1";
const SAMPLES: &str = "-- --train-samples 64 --test-samples 8 --image-size 16";

fn words<'a>(line: &'a str, more: &'a str) -> Vec<&'a str> {
    line.split_whitespace().chain(more.split_whitespace()).chain(SAMPLES.split_whitespace()).collect()
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn run(folder: &Folder, args: &[&str]) -> Output {
    folder.start(args).wait_with_output().unwrap()
}

/// One line on standard error with all of `culprits` in it, and a failure.
fn refuses(folder: &Folder, args: &[&str], culprits: &[&str]) {
    let output = run(folder, args);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{args:?}: {}", text(&output));
    assert_eq!(error.trim_end().lines().count(), 1, "{args:?}: {error}");
    for culprit in culprits {
        assert!(error.contains(culprit), "{args:?}: '{culprit}' is not in: {error}");
    }
}

#[test]
fn a_study_measures_every_point_and_does_not_measure_it_again() {
    let folder = Folder::new("study-whole");
    let args = words(TINY, "--repeats 2 --out s");
    let output = folder.run(&args);
    let results = json(&folder.0.join("s/results.json"));
    let points = results["points"].as_array().unwrap();
    assert_eq!(points.len(), 2);
    for (point, ranks) in points.iter().zip([1, 2]) {
        let runs = point["runs"].as_array().unwrap();
        assert_eq!(runs.len(), 2, "{point}");
        let done = &runs[0]["outcome"]["done"];
        assert_eq!(done["step_seconds"].as_array().unwrap().len(), 5, "the warm-up is left out: {done}");
        assert_eq!(done["ranks"].as_array().unwrap().len(), ranks);
        assert_eq!(done["images"], 5 * 8);
        assert!(done["cpu_utilisation"].as_f64().is_some_and(|busy| busy > 0.0), "{done}");
        assert!(done["memory_bytes"].as_u64().is_some_and(|bytes| bytes > 1 << 20), "{done}");
        assert_eq!(done["exchange_bytes"].as_u64().unwrap() > 0, ranks == 2, "{done}");
        assert!(done["curve"][0]["eval_top1"].is_f64(), "{done}");
        // Where the time went sums to the time.
        for parts in done["ranks"].as_array().unwrap().iter().filter(|_| ranks == 1) {
            let all = ["compute", "exchange", "wait", "data", "optimizer", "idle"];
            let sum: f64 = all.iter().map(|part| parts[part].as_f64().unwrap()).sum();
            let steps = done["step_seconds"].as_array().unwrap();
            let mean = steps.iter().map(|s| s.as_f64().unwrap()).sum::<f64>() / steps.len() as f64;
            assert!((sum - mean).abs() < 1e-5 + 0.001 * mean, "{sum} and {mean}");
        }
        assert!(point["limiter"]["sentence"].as_str().is_some_and(|sentence| !sentence.is_empty()));
        assert_eq!(point["summary"]["images_per_second"]["interval"], Value::Null, "two runs are too few");
    }
    assert!(points[1]["summary"]["speedup"]["median"].as_f64().is_some());
    let table = fs::read_to_string(folder.0.join("s/results.csv")).unwrap();
    assert_eq!(table.lines().count(), 1 + 4);
    assert!(text(&output).contains("results in s"), "{}", text(&output));

    let written = |name: &str| fs::metadata(folder.0.join(name)).unwrap().modified().unwrap();
    let before = written("s/points").max(written("s/runs"));
    let again = folder.run(&args);
    assert!(text(&again).contains("4 runs, 4 of them done before"), "{}", text(&again));
    let resumed = folder.run(&["study", "--resume", "s", "--json"]);
    assert_eq!(serde_json::from_slice::<Value>(&resumed.stdout).unwrap()["points"], results["points"]);
    assert_eq!(before, written("s/points").max(written("s/runs")), "nothing ran again");

    // Another study must not get into it; nor may it be taken for one of another version.
    refuses(
        &folder,
        &words(TINY, "--repeats 3 --out s"),
        &["s holds another study", "repeats runs 2 times, not 3"],
    );
    let other = TINY.replace("--batch-sizes 8", "--batch-sizes 4");
    refuses(
        &folder,
        &words(&other, "--repeats 2 --out s"),
        &["s holds another study", "it has no point strong-"],
    );
    let compared = folder.run(&["compare", "s", "s/results.json", "--json"]);
    let compared: Value = serde_json::from_slice(&compared.stdout).unwrap();
    assert_eq!(compared["pairs"][0]["verdict"], "too-few-runs");
}

#[test]
fn a_failed_run_is_recorded_and_the_rest_goes_on() {
    let folder = Folder::new("study-failed");
    let args = words(TINY, "--repeats 1 --out s");
    let output = folder.command(VITESSE, &args).env("VITESSE_FAULT", "panic:rank=1:step=2").output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let points = json(&folder.0.join("s/results.json"))["points"].clone();
    assert!(points[0]["runs"][0]["outcome"]["done"].is_object(), "one rank has no rank 1");
    let error = points[1]["runs"][0]["outcome"]["failed"]["error"].as_str().unwrap().to_string();
    assert!(error.contains("rank 1") && error.contains("exit code"), "{error}");
    assert_eq!((&points[1]["summary"], points[1]["flags"][0]["failed"][0].as_u64()), (&Value::Null, Some(0)));
    // Nothing is tried again unless that is asked for.
    folder.run(&args);
    assert_eq!(json(&folder.0.join("s/results.json"))["points"][1], points[1]);
    folder.run(&["study", "--resume", "s", "--retry-failed"]);
    assert!(json(&folder.0.join("s/results.json"))["points"][1]["runs"][0]["outcome"]["done"].is_object());
}

/// A launcher that fails as Open MPI's mpirun does for root, unless a file is there.
const AS_ROOT: &str = "#!/bin/sh\nif [ -e mended ]; then exec \"$@\"; fi\ncat >&2 <<'END'\n\
--------------------------------------------------------------------------\n\
mpirun has detected an attempt to run as root.\n\n\
Running as root is *strongly* discouraged as any mistake (e.g., in\n\
defining TMPDIR) or bug can result in catastrophic damage to the OS\n\
--------------------------------------------------------------------------\nEND\nexit 1\n";

#[test]
fn a_study_that_can_not_begin_says_why_once_and_goes_on_when_it_can() {
    let folder = Folder::new("study-launcher");
    fs::write(folder.0.join("start"), AS_ROOT).unwrap();
    let tiny = TINY.replace("--ranks 1,2", "--ranks 1 --data-fraction 0.25,0.5,0.75,1 --launcher LAUNCHER");
    let launcher = format!("sh {}", folder.0.join("start").display());
    let args: Vec<&str> = words(&tiny, "--repeats 2 --out s")
        .into_iter()
        .map(|word| if word == "LAUNCHER" { launcher.as_str() } else { word })
        .collect();
    let output = run(&folder, &args);
    let (said, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    let reason = "mpirun has detected an attempt to run as root. (exit code 1)";
    let expected = format!("vitesse: the first 3 runs failed, and so would the other 5: {reason}; ");
    assert!(error.starts_with(&expected) && error.trim_end().lines().count() == 1, "{error}");
    assert_eq!((said.matches(reason).count(), said.matches("failed as before").count()), (1, 2), "{said}");
    // All that was printed is kept, and nothing is on record that would not be tried again.
    let logs = fs::read_dir(folder.0.join("s/runs")).unwrap().map(|file| file.unwrap().path());
    let logs: Vec<_> = logs.filter(|path| path.to_string_lossy().ends_with(".stderr.log")).collect();
    assert_eq!(logs.len(), 3);
    assert!(
        logs.iter().all(|log| fs::read_to_string(log).unwrap().contains("catastrophic damage to the OS"))
    );
    assert!(!folder.0.join("s/points").exists());
    // The same command, when it is mended.
    fs::write(folder.0.join("mended"), "").unwrap();
    folder.run(&args);
    let results = json(&folder.0.join("s/results.json"));
    let runs =
        results["points"].as_array().unwrap().iter().flat_map(|point| point["runs"].as_array().unwrap());
    let done: Vec<bool> = runs.map(|run| run["outcome"]["done"].is_object()).collect();
    assert_eq!(done, [true; 8]);
}

/// With MPI, as root, mpirun needs to be told; without it, a study has no use for it.
#[test]
fn a_study_over_mpi_that_can_not_be_is_refused_before_it_begins() {
    let folder = Folder::new("study-mpi");
    let args = words(TINY, "--repeats 1 --out s --comm mpi");
    let mut command = folder.command(VITESSE, &args);
    command.env_remove("OMPI_ALLOW_RUN_AS_ROOT").env_remove("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM");
    let refusal = match cfg!(feature = "mpi") {
        false => "--comm mpi: this vitesse was built without MPI",
        // SAFETY: only asks.
        true if unsafe { libc::geteuid() } == 0 => "OMPI_ALLOW_RUN_AS_ROOT=1",
        true => return,
    };
    for train in [false, true] {
        let mut train_over_mpi =
            folder.command(VITESSE, &["train", "--ranks", "2", "--comm", "mpi", "--out", "s"]);
        train_over_mpi.env_remove("OMPI_ALLOW_RUN_AS_ROOT").env_remove("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM");
        let output = if train { train_over_mpi.output() } else { command.output() }.unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(refusal) && error.trim_end().lines().count() == 1, "{error}");
        assert!(!folder.0.join("s").exists(), "nothing was begun");
    }
}

#[test]
fn strong_scaling_holds_its_batch_without_being_told_one() {
    let folder = Folder::new("study-global-batch");
    fs::write(folder.0.join("nodes.toml"), "kind = \"nodes\"\nhosts = [\"a\", \"b\", \"c\", \"d\"]\n")
        .unwrap();
    for study in ["strong", "nodes.toml"] {
        let line =
            format!("study plan {study} --ranks 1,2,4 --threads 1 --oversubscribe --model vit-nano/8 --json");
        let output = folder.run(
            &line.split(' ').chain("-- --train-samples 512 --image-size 16".split(' ')).collect::<Vec<_>>(),
        );
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        let points = plan["points"].as_array().unwrap();
        let shape = |point: &Value| {
            let settings = &point["settings"];
            ["ranks", "batch_per_rank", "global_batch", "steps"].map(|key| settings[key].as_u64().unwrap())
        };
        let mut shapes: Vec<[u64; 4]> = points.iter().map(shape).collect();
        shapes.dedup();
        assert_eq!(shapes, [[1, 64, 64, 8], [2, 32, 64, 8], [4, 16, 64, 8]], "{study}");
    }
}

#[test]
fn bad_input() {
    let folder = Folder::new("study-bad");
    let write = |name: &str, text: &str| fs::write(folder.0.join(name), text).unwrap();
    write("s.toml", "kind = \"strong\"\nrank = [1, 2]\n");
    refuses(&folder, &["study", "s.toml"], &["s.toml: unknown key rank", "did you mean ranks?"]);
    write("s.toml", "kind = \"strong\"\nranks = [1, 2\n");
    refuses(&folder, &["study", "plan", "s.toml"], &["s.toml: line 2"]);
    write("s.json", "{\"kind\": \"strung\"}");
    refuses(&folder, &["study", "s.json"], &["s.json: key kind"]);
    refuses(&folder, &["study", "strung"], &["strung: is neither a file nor one of", "did you mean strong?"]);
    refuses(
        &folder,
        &["study", "strong", "--ranks", "1,64", "--batch-sizes", "64"],
        &["64 ranks", "cores", "--oversubscribe"],
    );
    let indivisible = ["study", "strong", "--ranks", "1,3", "--batch-sizes", "64", "--oversubscribe"];
    refuses(&folder, &indivisible, &["strong over 3 ranks", "64 is no multiple of 3 ranks"]);
    refuses(&folder, &["study", "batch", "--model", "vit-nano/5"], &["batch over 1 rank"]);
    refuses(&folder, &["study", "batch", "--", "--no-such-option"], &["--no-such-option"]);
    refuses(&folder, &["study", "batch", "--", "--out", "x"], &["--out is the study's own"]);
    let many: String = (1..300).map(|n| n.to_string()).collect::<Vec<_>>().join(",");
    let grid = [
        "study",
        "batch",
        "--ranks",
        &many,
        "--batch-sizes",
        &many,
        "--accumulation",
        &many,
        "--repeats",
        "1000",
    ];
    refuses(
        &folder,
        &grid,
        &["299 ranks × 299 batch sizes × 299 accumulations: a study has at most 2000 points"],
    );
    write("grid.toml", &format!("ranks = [{many}]\nbatch-sizes = [{many}]\naccumulation = [{many}]\n"));
    refuses(&folder, &["study", "plan", "grid.toml"], &["a study has at most 2000 points"]);
    refuses(
        &folder,
        &["study", "batch", "--repeats", "18446744073709551615"],
        &["a study has at most 100000 runs"],
    );
    refuses(&folder, &["study", "--resume", "nowhere"], &["nowhere: holds no study"]);
    refuses(&folder, &["compare", "nowhere", "s"], &["nowhere"]);
    assert!(!folder.0.join("studies").exists(), "nothing was begun");

    fs::create_dir(folder.0.join("mine")).unwrap();
    write("mine/notes.txt", "dear diary");
    refuses(&folder, &words(TINY, "--out mine"), &["mine", "no study's"]);
    assert_eq!(fs::read_dir(folder.0.join("mine")).unwrap().count(), 1);
}

#[test]
fn results_that_can_not_be_read_are_left_alone() {
    let folder = Folder::new("study-corrupt");
    let args = words(TINY, "--repeats 1 --out s");
    folder.run(&args);
    let path = |name: &str| folder.0.join("s").join(name);
    let point = fs::read_dir(path("points")).unwrap().next().unwrap().unwrap().path();
    for file in [path("results.json"), path("study.json"), point] {
        let whole = fs::read_to_string(&file).unwrap();
        let name = file.file_name().unwrap().to_str().unwrap();
        let other = whole.replacen("\"format\": 1", "\"format\": 7", 1);
        for (broken, culprit) in [(&whole[..whole.len() / 2], "is no"), (other.as_str(), "has format 7")] {
            fs::write(&file, broken).unwrap();
            refuses(&folder, &args, &[name, culprit]);
            refuses(&folder, &["study", "--resume", "s"], &[name, culprit]);
            assert_eq!(fs::read_to_string(&file).unwrap(), broken, "nothing is written over");
            if name == "results.json" {
                refuses(&folder, &["compare", "s", "s"], &[name, culprit]);
            }
        }
        fs::write(&file, whole).unwrap();
    }
    let plan = fs::read_to_string(path("study.json")).unwrap();
    let version = format!("\"version\": \"{}\"", env!("CARGO_PKG_VERSION"));
    fs::write(path("study.json"), plan.replacen(&version, "\"version\": \"0.0.1\"", 1)).unwrap();
    refuses(&folder, &args, &["was begun by vitesse 0.0.1"]);
}

#[test]
fn a_plan_is_printed_and_nothing_runs() {
    let folder = Folder::new("study-plan");
    let output = folder.run(&words(&TINY.replace("study", "study plan"), "--repeats 3"));
    let text = text(&output);
    assert!(text.contains("2 points × 3 repeats = 6 runs, about"), "{text}");
    assert!(text.contains("the same images and the same global batch"), "{text}");
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 0);
}

/// Must it be killed, a study loses the run under way and nothing else: every run of every point is there once.
fn killed_and_resumed(name: &str, repeats: usize, kills: usize) {
    let folder = Folder::new(name);
    let more = format!("--repeats {repeats} --out s");
    let args = words(TINY, &more);
    let mut random = 12345u64;
    let mut killed = 0;
    while killed < kills {
        let mut child = folder.start(&args);
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let moment = Instant::now() + Duration::from_millis((random >> 33) % 1500);
        while Instant::now() < moment && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(2));
        }
        // A study that was done before its kill leaves nothing to be lost: it begins anew.
        if child.try_wait().unwrap().is_some() {
            check(&folder, repeats);
            fs::remove_dir_all(folder.0.join("s")).unwrap();
            continue;
        }
        child.kill().unwrap();
        child.wait().unwrap();
        killed += 1;
    }
    folder.run(&args);
    check(&folder, repeats);
}

fn check(folder: &Folder, repeats: usize) {
    let results = json(&folder.0.join("s/results.json"));
    let points = results["points"].as_array().unwrap();
    let mut ids = BTreeSet::new();
    for point in points {
        assert!(ids.insert(point["id"].as_str().unwrap().to_string()), "twice: {}", point["id"]);
        let runs = point["runs"].as_array().unwrap();
        let numbers: Vec<u64> = runs.iter().map(|run| run["repeat"].as_u64().unwrap()).collect();
        assert_eq!(numbers, (0..repeats as u64).collect::<Vec<_>>(), "{}", point["id"]);
        assert!(runs.iter().all(|run| run["outcome"]["done"].is_object()), "{point}");
    }
    let plan = json(&folder.0.join("s/study.json"));
    let planned =
        plan["points"].as_array().unwrap().iter().map(|point| point["id"].as_str().unwrap().to_string());
    assert_eq!(ids, planned.collect::<BTreeSet<_>>());
    let files = fs::read_dir(folder.0.join("s/points")).unwrap();
    let files: BTreeSet<String> =
        files.map(|file| file.unwrap().file_name().to_string_lossy().into_owned()).collect();
    assert_eq!(files, ids.iter().map(|id| format!("{id}.json")).collect::<BTreeSet<_>>());
}

#[test]
fn a_killed_study_goes_on() {
    killed_and_resumed("study-killed", 2, 2);
}

#[test]
#[ignore = "takes a minute"]
fn a_study_killed_ten_times_loses_no_point_and_has_none_twice() {
    killed_and_resumed("study-killed-ten", 5, 10);
}
