//! How the program behaves towards whoever types: what is written where, what it says of mistakes, and that it fits the terminal.

mod common;

use common::{Folder, VITESSE, scenes, text};
use data::segment::overlay::save_mask;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

const TINY: &str =
    "--model vit-nano/8 --image-size 16 --batch-size 8 --train-samples 16 --test-samples 8 --threads 1";

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

fn run(folder: &Folder, line: &str) -> Output {
    folder.start(&words(line)).wait_with_output().unwrap()
}

fn good(folder: &Folder, line: &str) -> String {
    text(&folder.run(&words(line)))
}

/// The one line on standard error that a command is refused with.
fn refused(folder: &Folder, line: &str) -> String {
    let output = run(folder, line);
    let error = String::from_utf8_lossy(&output.stderr).trim_end().to_string();
    assert_eq!(output.status.code(), Some(1), "{line}: {}", text(&output));
    assert_eq!(error.lines().count(), 1, "{line}: {error}");
    error.strip_prefix("vitesse: ").unwrap_or_else(|| panic!("{line}: {error}")).to_string()
}

/// A run of two steps in `run`, and images to classify.
fn trained(name: &str) -> Folder {
    let folder = Folder::new(name);
    good(&folder, &format!("train {TINY} --steps 2 --out run"));
    fs::create_dir_all(folder.0.join("photos/more")).unwrap();
    for (name, side) in [("a.png", 16), ("b.png", 20), ("photos/c.png", 16), ("photos/more/d.png", 9)] {
        save_mask(&vec![7; side * side], (side, side), &folder.0.join(name)).unwrap();
    }
    fs::write(folder.0.join("bad.png"), "no image").unwrap();
    folder
}

#[test]
fn short_runs_evaluate_once_and_say_on_what() {
    let folder = Folder::new("manners-eval");
    let line = "train --model vit-nano/8 --image-size 16 --batch-size 8 --train-samples 8 --test-samples 600 --steps 4 --threads 1";
    let told = good(&folder, line);
    assert_eq!(told.matches("validation:").count(), 1, "{told}");
    assert!(told.contains("evaluates on 96 of 600 validation images (--eval-images all for all)"), "{told}");
    let all = good(&folder, &format!("{line} --eval-images all --eval-every 2"));
    assert_eq!(all.matches("validation:").count(), 2, "{all}");
    assert!(!all.contains("evaluates on"), "{all}");
    let explained = good(&folder, "config explain --task segment --train-samples 16 --epochs 20");
    let line = explained.lines().find(|line| line.trim_start().starts_with("eval-every")).unwrap();
    assert!(line.contains("67 images") || line.contains("72 images"), "{line}");
}

/// The example of the README, with neither the data nor the cores.
#[test]
fn a_study_is_planned_without_its_cores_and_data() {
    let folder = Folder::new("manners-plan");
    let plan = "study plan strong --ranks 1,2,4 --model vit-ti/4 --data cifar10:data";
    let told = good(&folder, plan);
    assert!(told.contains("3 points × 5 repeats = 15 runs"), "{told}");
    assert!(told.contains("`vitesse data get cifar10 data` downloads it"), "{told}");
    let many =
        good(&folder, "study plan strong --ranks 1,4096 --threads 1 --model vit-nano/8 --batch-sizes 4096");
    assert!(many.contains("one point needs more than this machine has"), "{many}");
    let json: Value = serde_json::from_slice(&folder.run(&words(&format!("{plan} --json"))).stdout).unwrap();
    assert!(json["needs"][0].as_str().unwrap().starts_with("--data cifar10:data is not there"), "{json}");
    // Points that differ in nothing but what is swept are told apart.
    for (sweep, named) in [
        ("optimizer --ranks 1", ["· adamw", "· sgd", "· muon"]),
        ("zero --ranks 2 --oversubscribe", ["· stage 0", "· stage 1", "· stage 3"]),
    ] {
        let told =
            good(&folder, &format!("study plan {sweep} --threads 1 --model vit-nano/8 --batch-sizes 8"));
        assert!(named.iter().all(|name| told.contains(name)), "{told}");
    }
    // What can't be known is asked for, and running is another matter.
    assert!(refused(&folder, "study plan strong --ranks 1 --data folder:photos").contains("photos"));
    assert!(refused(&folder, "study strong --ranks 1 --data cifar10:data").contains("data: cannot open"));
    assert!(refused(&folder, "study strong --ranks 4096 --threads 1").contains("--oversubscribe"));
}

#[test]
fn what_is_there_is_replaced_by_force_alone() {
    let folder = trained("manners-force");
    scenes(&folder, (16, 16), [8, 4]);
    good(
        &folder,
        "train --data masks:set --model vit-nano/8+linear --image-size 16 --batch-size 4 --steps 1 --threads 1 --out pixels",
    );
    fs::create_dir_all(folder.0.join("study")).unwrap();
    let results = serde_json::to_string(&study::sample::quick()).unwrap();
    fs::write(folder.0.join("study/results.json"), results).unwrap();
    let writes: [(&str, &[&str]); 10] = [
        ("export run weights.safetensors", &["weights.safetensors"]),
        ("classify a.png --weights run --grid grid.png", &["grid.png"]),
        ("segment a.png --weights pixels --out masks", &["masks/a.mask.png", "masks/a.overlay.png"]),
        (
            "eval --weights run --confusion confusion.csv --logits logits.safetensors",
            &["confusion.csv", "logits.safetensors"],
        ),
        ("eval --weights pixels --masks predicted", &["predicted/0.png"]),
        ("data inspect --train-samples 8 --test-samples 8 --sheet sheet.png", &["sheet.png"]),
        (
            "report study --out drawn --figures svg --figures-dir figures",
            &[
                "drawn/report.html",
                "drawn/report.md",
                "figures/strong-speedup.svg",
                "figures/strong-speedup.csv",
            ],
        ),
        ("launch --with mpirun --out job.sh", &["job.sh"]),
        ("man pages", &["pages/vitesse.1", "pages/vitesse-train.1"]),
        (
            "train --model vit-nano/8 --image-size 16 --batch-size 8 --train-samples 8 --test-samples 8 --steps 1 --trace trace.json --rank-logs logs",
            &["trace.json", "logs/rank-0.log"],
        ),
    ];
    for (line, files) in writes {
        good(&folder, line);
        for file in files {
            let path = folder.0.join(file);
            let aside = folder.0.join("aside");
            assert!(path.exists(), "{line} doesn't write {file}");
            // Of several files, each alone keeps the command from writing.
            let folders: Vec<&Path> = files.iter().filter_map(|other| Path::new(other).parent()).collect();
            for other in folders.iter().filter(|other| **other != Path::new("")) {
                fs::remove_dir_all(folder.0.join(other)).unwrap_or_default();
            }
            for other in files.iter().filter(|other| *other != file) {
                fs::remove_file(folder.0.join(other)).unwrap_or_default();
            }
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "mine").unwrap();
            let why = refused(&folder, line);
            assert!(why.ends_with("exists already; --force replaces it"), "{line}: {why}");
            assert!(why.contains(Path::new(file).file_name().unwrap().to_str().unwrap()), "{line}: {why}");
            assert_eq!(fs::read(&path).unwrap(), b"mine", "{line}");
            good(&folder, &format!("{line} --force"));
            assert_ne!(fs::read(&path).unwrap(), b"mine", "{line}");
            assert!(!aside.exists());
        }
    }
    // A study's own report is drawn again.
    good(&folder, "report study");
    good(&folder, "report study");
}

#[test]
fn images_that_can_be_read_are_answered_for() {
    let folder = trained("manners-images");
    let output = run(&folder, "classify a.png bad.png photos missing.png b.png --weights run --top 1");
    let (told, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{told}{errors}");
    let named: Vec<&str> = told.lines().filter(|line| !line.starts_with(' ')).collect();
    assert_eq!(named, ["a.png", "photos/c.png", "photos/more/d.png", "b.png"]);
    assert_eq!(told.lines().count(), 8, "{told}");
    assert!(errors.contains("vitesse: bad.png: ") && errors.contains("vitesse: missing.png: "), "{errors}");
    assert!(errors.ends_with("vitesse: 2 of 6 images could not be read\n"), "{errors}");

    let output = run(&folder, "classify a.png bad.png b.png --weights run --json --grid grid.png");
    let lines: Vec<Value> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(output.status.code(), Some(1));
    assert!(lines[0]["classes"].is_array() && lines[2]["classes"].is_array(), "{lines:?}");
    assert!(
        lines[1]["error"].as_str().unwrap().contains("bad.png") && lines[1]["image"] == "bad.png",
        "{lines:?}"
    );
    assert!(folder.0.join("grid.png").exists());
    assert!(refused(&folder, "classify bad.png --weights run").starts_with("bad.png: "));
    fs::create_dir_all(folder.0.join("empty")).unwrap();
    assert_eq!(
        refused(&folder, "classify empty --weights run"),
        "empty: has no images (jpg, jpeg, png or webp)"
    );

    scenes(&folder, (16, 16), [8, 4]);
    good(
        &folder,
        "train --data masks:set --model vit-nano/8+linear --image-size 16 --batch-size 4 --steps 1 --threads 1 --out pixels",
    );
    let output = run(&folder, "segment a.png bad.png photos --weights pixels --out masks --json");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    for mask in ["a", "c", "more/d"] {
        assert!(folder.0.join(format!("masks/{mask}.mask.png")).exists(), "{mask}");
    }
    assert!(
        text(&output).contains("\"error\":") && text(&output).contains("1 of 4 images could not be read")
    );
}

#[test]
fn flags_of_other_programs_are_answered_with_ours() {
    let folder = Folder::new("manners-flags");
    for (typed, answer) in [
        ("train --amp", "--amp: there is no such flag; half precision is --precision bf16 or fp16"),
        ("train --fp16", "--precision"),
        ("train --pretrained", "--init FILE"),
        ("train --wd 0.1", "weight decay is --weight-decay"),
        ("train --eval-only", "`vitesse eval --weights RUN`"),
        ("train --wandb", "metrics.jsonl"),
        ("train --gpus 2", "--ranks N --device cuda"),
        ("train --num_workers 4", "threads that read images are --workers N"),
        ("train --learning_rate 1", "the learning rate is --lr"),
        ("train --batch_size 8", "--batch_size: there is no such flag; flags have dashes: --batch-size"),
        ("train -lr 1", "there is no such flag"),
        ("train -e", "`vitesse eval --weights RUN`"),
        ("train --tp 2", "--ranks N trains data-parallel"),
        ("train --dtype bf16", "--precision"),
        ("plan --epochs 2", "--epochs: there is no such flag; `vitesse train` has it"),
        ("plan --drop-last", "--drop-last: there is no such flag; `vitesse train` has it"),
        ("plan --flip 0.5", "--flip: there is no such flag; `vitesse train` has it"),
        ("train --accumulation 4", "--accumulation: there is no such flag; did you mean --accumulate?"),
        ("train --batch-sizes 8", "--batch-sizes: there is no such flag; did you mean --batch-size?"),
        ("train --optimizers adamw", "--optimizers: there is no such flag; did you mean --optimizer?"),
        ("study strong --accumulate 2", "--accumulate: there is no such flag; did you mean --accumulation?"),
        ("train --modle x", "--modle: there is no such flag; did you mean --model?"),
        ("train --qwertyuiop", "`vitesse train --help` lists all"),
        ("classify a.png --weights w --wd 1", "weight decay is --weight-decay (of `vitesse train`)"),
        ("trian", "trian: there is no such command; did you mean train?"),
    ] {
        let why = refused(&folder, typed);
        assert!(why.contains(answer), "{typed}: {why}");
    }
}

#[test]
fn bad_values_are_refused_in_one_style() {
    let folder = Folder::new("manners-values");
    for (typed, answer) in [
        ("train --lr x", "--lr x: is no number"),
        ("train --steps 1.5", "--steps 1.5: is no whole number of 0 or more"),
        ("train --device tpu", "--device tpu: is none of cpu, cuda"),
        ("train --device gpu", "--device gpu: is none of cpu, cuda; did you mean cuda?"),
        (
            "train --optimizer adam",
            "--optimizer adam: is none of adamw, sgd, lamb, muon; did you mean adamw?",
        ),
        (
            "train --schedule Cosin",
            "--schedule Cosin: is none of cosine, linear, step, poly, constant; did you mean cosine?",
        ),
        ("train --lr -1", "--lr -1: must be positive"),
        ("train --epochs -1", "--epochs -1: is no whole number of 0 or more"),
        ("study strong --repeats -1", "--repeats -1: is no whole number of 0 or more"),
        ("bench --ranks -2", "--ranks -2: is no whole number of 0 or more"),
        ("train --ranks 0", "--ranks 0: must be at least 1"),
        ("train --max-restarts 1 --min-ranks 0 --out run", "--min-ranks 0: must be at least 1"),
        ("bench --inference --optimizer sgd", "--optimizer sgd: is for training steps, not for --inference"),
        ("bench --inference --drop-path 0.1", "--drop-path 0.1: is for training steps"),
        ("train --model resnet50", "--model resnet50: unknown model: "),
        ("train --batch-size 0", "--batch-size 0: must be at least 1"),
        (
            "train --betas 0.9",
            "--betas 0.9: is not BETA1,BETA2: two numbers from 0 to below 1, such as 0.9,0.98",
        ),
        (
            "train --warmup-steps 5eps",
            "--warmup-steps 5eps: is neither steps, such as 1000, nor epochs, such as 30ep",
        ),
        ("plan --ranks x", "--ranks x: is no whole number of 0 or more"),
        ("study strong --device tpu", "--device tpu: is none of cpu, cuda"),
        ("study strong --epochs 1 --steps 2", "can't be used with"),
        ("export a b.safetensors --to keras", "--to keras: is none of timm, torchvision, huggingface"),
        ("classify a.png", "vitesse classify: --weights <RUN|WEIGHTS> is missing"),
        ("eval --weights nowhere", "nowhere: "),
        ("train --data cifar10:nowhere", "nowhere: "),
        ("train --config nowhere.json", "nowhere.json: "),
        ("train --init nowhere.pth --steps 1", "nowhere.pth: "),
        ("report nowhere", "nowhere: no such folder"),
        ("study --resume nowhere", "nowhere"),
        ("compare nowhere elsewhere", "nowhere"),
    ] {
        let why = refused(&folder, typed);
        assert!(
            why.starts_with(answer) || why.contains(answer) && answer.starts_with("can't"),
            "{typed}: {why}"
        );
        assert!(!why.contains("os error"), "{typed}: {why}");
        assert!(why.matches("No such file or directory").count() <= 1, "{typed}: {why}");
    }
}

/// The exit codes are 1, 3 and those of signals (ARCHITECTURE.md); a parser's 2 is none.
#[test]
fn a_missing_command_is_answered_with_help_and_exit_code_1() {
    let folder = Folder::new("manners-missing");
    for line in ["", "data", "config"] {
        let output = run(&folder, line);
        assert_eq!(output.status.code(), Some(1), "{line}: {}", text(&output));
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(told.contains("Commands:") && output.stdout.is_empty(), "{line}: {told}");
    }
    assert!(run(&folder, "--help").status.success() && run(&folder, "help data").status.success());
}

/// Counts and their nouns come from `text::many`, so that none is "1 threads".
#[test]
fn counts_have_their_nouns_in_one_place() {
    let nouns = [
        "threads",
        "ranks",
        "steps",
        "images",
        "classes",
        "cores",
        "runs",
        "points",
        "repeats",
        "hosts",
        "nodes",
        "tensors",
        "parameters",
        "channels",
        "checkpoints",
        "epochs",
        "GPUs",
        "buckets",
        "kernels",
        "kinds",
        "evaluations",
        "numbers",
    ];
    let mut found = vec![];
    let sources = Path::new(env!("CARGO_MANIFEST_DIR"));
    for folder in [sources.join("src"), sources.join("../config/src")] {
        let mut folders = vec![folder];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
                if entry.is_dir() {
                    folders.push(entry);
                    continue;
                }
                let text = fs::read_to_string(&entry).unwrap();
                let text = text.split("#[cfg(test)]\nmod tests").next().unwrap();
                let tests = entry.components().any(|part| {
                    ["tests", "tests.rs", "property"].contains(&part.as_os_str().to_str().unwrap())
                });
                for line in text.lines().filter(|line| !tests && !line.trim_start().starts_with("//")) {
                    for noun in nouns {
                        let counted = line.match_indices(&format!("}} {noun}")).any(|(at, what)| {
                            let before = line[..at].rsplit('{').next().unwrap_or_default();
                            let constant =
                                !before.is_empty() && before.chars().all(|c| c.is_ascii_uppercase());
                            let rest = &line[at + what.len()..];
                            !constant && !rest.starts_with(|c: char| c.is_alphanumeric() || c == '/')
                        });
                        if counted {
                            found.push(format!("{}: {}", entry.display(), line.trim()));
                        }
                    }
                }
            }
        }
    }
    assert!(found.is_empty(), "use text::many:\n{}", found.join("\n"));
}

#[test]
fn counts_are_whole_and_singular_where_there_is_one() {
    let folder = trained("manners-counts");
    let json: Value =
        serde_json::from_slice(&folder.run(&words("eval --weights run --json")).stdout).unwrap();
    assert_eq!(json["samples"].to_string(), "8");
    let told = good(
        &folder,
        "train --model vit-nano/8 --image-size 16 --batch-size 1 --train-samples 1 --test-samples 1 --steps 1 --threads 1",
    );
    assert!(told.contains("1 image, 16 px") && told.contains("1 step · 1 thread"), "{told}");
}

#[test]
fn small_numbers_are_short_and_counts_of_models_whole() {
    let folder = Folder::new("manners-numbers");
    let told = good(&folder, "config explain");
    assert!(told.lines().any(|line| words(line).starts_with(&["eps", "1e-8"])), "{told}");
    let models: Value = serde_json::from_slice(&folder.run(&words("models --json")).stdout).unwrap();
    assert!(models.as_array().unwrap().iter().all(|model| model["forward_flops"].is_u64()), "{models}");
    let told = good(&folder, "data inspect --train-samples 20 --test-samples 15");
    assert!(told.contains("10 classes with 2 images each"), "{told}");
    assert!(told.contains("10 classes with 1 to 2 images each"), "{told}");
}

/// Names of operations are up to 40 columns wide: the numbers beside them stay under each other.
#[test]
fn the_closing_table_stays_in_line() {
    let folder = Folder::new("manners-table");
    let told = good(
        &folder,
        "train --task segment --image-size 64 --batch-size 2 --steps 1 --train-samples 4 --test-samples 2 --threads 1",
    );
    let (_, table) = told.split_once("where the time went:\n").unwrap();
    let rows: Vec<usize> = table.lines().filter_map(|line| line.chars().position(|c| c == '%')).collect();
    // A row of small kinds has a percent sign in its name.
    let last = rows.len() - 1;
    assert!(rows.len() > 5 && rows[..last].iter().all(|at| *at == rows[0]), "{told}");
}

const COLUMNS: usize = 60;

/// Lines that are wider than the terminal, but for single words, which nothing can break.
fn too_wide(text: &str) -> Vec<&str> {
    let wide = |line: &&str| line.chars().count() > COLUMNS && line.trim().contains(' ');
    text.lines().filter(wide).collect()
}

#[test]
fn sixty_columns_are_enough() {
    let folder = trained("manners-width");
    scenes(&folder, (16, 16), [8, 4]);
    let lines = [
        format!("train {TINY} --steps 3"),
        format!("train {TINY} --steps 3 --ranks 2"),
        "train --data masks:set --model vit-nano/8+linear --image-size 16 --batch-size 4 --steps 2 --threads 1 --out pixels".into(),
        "eval --weights run".into(),
        "eval --weights pixels".into(),
        "classify a.png --weights run".into(),
        "config explain --task segment".into(),
        "data inspect --train-samples 8 --test-samples 8".into(),
        "data inspect --data masks:set".into(),
        "plan --model vit-nano/8".into(),
        "doctor".into(),
        "bench --model vit-nano/8 --batch-size 2 --steps 1 --threads 1".into(),
        "study plan strong --ranks 1,2,4 --model vit-ti/4 --data cifar10:data".into(),
        "study strong --ranks 1,2 --threads 1 --oversubscribe --model vit-nano/8 --batch-sizes 8 --steps 5 --warmup 1 --repeats 1 --out s -- \
         --train-samples 64 --test-samples 8 --image-size 16".into(),
        "train --help".into(),
        "study --help".into(),
    ];
    for line in lines {
        let mut command = folder.command(VITESSE, &words(&line));
        let output = command.env("COLUMNS", COLUMNS.to_string()).output().unwrap();
        assert!(output.status.success(), "{line}: {}", text(&output));
        let told = String::from_utf8_lossy(&output.stdout);
        assert!(too_wide(&told).is_empty(), "{line}:\n{}\nin\n{told}", too_wide(&told).join("\n"));
    }
    // JSON stays on its line.
    let mut command = folder.command(VITESSE, &["eval", "--weights", "run", "--json"]);
    let output = command.env("COLUMNS", COLUMNS.to_string()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).lines().count(), 1);
}

/// On a real terminal of sixty columns: the bar, too.
#[test]
fn progress_fits_a_terminal_of_sixty_columns() {
    if Command::new("script").arg("--version").output().is_err() {
        testing::skip!("no program `script`, which makes a terminal");
    }
    let folder = Folder::new("manners-bar");
    let run = format!("stty cols {COLUMNS} rows 24; {VITESSE} train {TINY} --epochs 8 --out run");
    let output =
        folder.command("script", &["-qec", &run, "/dev/null"]).env_remove("COLUMNS").output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let told = text(&output);
    // Sequences that move the cursor or choose colours take no columns.
    let mut plain = String::new();
    let mut rest = told.chars().peekable();
    while let Some(c) = rest.next() {
        if c == '\u{1b}' {
            while rest.next().is_some_and(|c| !c.is_ascii_alphabetic()) {}
        } else {
            plain.push(if c == '\r' { '\n' } else { c });
        }
    }
    assert!(plain.contains("/16 · loss "), "{plain}");
    assert!(too_wide(&plain).is_empty(), "{}", too_wide(&plain).join("\n"));
}

#[test]
fn shells_are_offered_values() {
    let folder = Folder::new("manners-completions");
    for shell in ["bash", "zsh", "fish"] {
        let script = good(&folder, &format!("completions {shell}"));
        let values = "vit-ti/16 swinv2-b/w8+upernet muon cosine cuda bf16 cifar10 torchvision fixed-per-rank";
        for value in words(values) {
            assert!(script.contains(value), "{shell}: {value}");
        }
    }
    // What is offered is not all that may be typed.
    assert!(good(&folder, "plan --model vit-ti/8").contains("vit-ti/8"));
}
