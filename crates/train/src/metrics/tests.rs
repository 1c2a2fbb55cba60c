use super::*;
use crate::session::Score;
use records::Parts;
use std::fs;

/// A run's folder.
struct Folder(testing::Folder);

impl Folder {
    fn new(name: &str) -> Self {
        Folder(testing::Folder::new(&format!("metrics-{name}")))
    }

    fn files(&self) -> [String; 3] {
        [jsonl_path(&self.0), csv_path(&self.0), ranks_path(&self.0)]
            .map(|path| fs::read_to_string(path).unwrap())
    }

    /// Adds what a crash may leave to both files.
    fn tear(&self, jsonl: &[u8], csv: &[u8]) {
        for (path, text) in [(jsonl_path(&self.0), jsonl), (csv_path(&self.0), csv)] {
            File::options().append(true).open(path).unwrap().write_all(text).unwrap();
        }
    }
}

/// A step that took a second: half of it computing, the rest reading images.
fn account(ranks: usize) -> Step {
    let parts = Parts { compute: 0.5, data: 0.5, ..Parts::default() };
    let warm = Sensors { load: 0.5, memory_used: 1000.0, temperature: 61.0, ..Sensors::unknown() };
    let sensors = [&vec![Sensors::unknown(); ranks - 1][..], &[warm]].concat();
    Step { parts: vec![parts; ranks], sensors, cpu: 0.25, ..Step::default() }
}

/// Steps of a run that evaluates after every third.
fn write(metrics: &mut Metrics, steps: std::ops::Range<u64>) {
    for step in steps {
        let loss = 2.5 - 0.1 * step as f64;
        let score = Score { loss, top1: 0.125, top5: 0.5, samples: 8.0 };
        let gradient_norm = if step == 4 { f64::INFINITY } else { 1.0 / 3.0 };
        let result = StepResult {
            score,
            images: 8.0,
            learning_rate: 1e-3,
            gradient_norm,
            applied: true,
            loss_scale: None,
        };
        let account = account(2);
        metrics.step(&step_line(step, step / 3, &result, &account), &account).unwrap();
        if step % 3 == 2 {
            let score = Evaluation::Images(Score { loss: f64::NAN, ..score });
            metrics.evaluation(&evaluation_line(step, step / 3, &score)).unwrap();
        }
    }
    metrics.sync().unwrap();
}

fn uninterrupted(name: &str, steps: u64) -> Folder {
    let folder = Folder::new(name);
    write(&mut Metrics::create(&folder.0).unwrap(), 0..steps);
    folder
}

#[test]
fn both_files_say_the_same() {
    let [jsonl, csv, ranks] = uninterrupted("same", 5).files();
    let lines: Vec<&str> = csv.lines().collect();
    assert!(lines[0].starts_with("step,epoch,loss,lr,images_per_second,grad_norm,top1,eval_loss,eval_top1,"));
    let times = "1.000000,0.500000,0.000000,0.000000,0.500000,0.000000,0.000000,0.000000,1,0,,0.250000";
    let gpu = ",,0.500000,1000,61.000000,,,,";
    assert_eq!(lines[1], format!("0,0,2.5,0.001,8.000000,0.3333333333333333,0.125,,,,{times},{gpu}"));
    assert_eq!(lines[4], "2,0,,,,,,,0.125,0.5,,,,,,,,,,,,,,,,,,,,,");
    assert_eq!(lines[6], format!("4,1,2.1,0.001,8.000000,,0.125,,,,{times},{gpu}"));
    assert_eq!(jsonl.lines().count() + 1, lines.len());
    assert_eq!(ranks.lines().count(), 10, "two ranks, five steps");
    assert!(ranks.starts_with("{\"step\":0,\"rank\":0,\"seconds\":1.000000,\"compute\":0.500000,"));
    let (first, second) = (ranks.lines().next().unwrap(), ranks.lines().nth(1).unwrap());
    assert!(
        !first.contains("gpu") && second.ends_with("\"gpu_temperature\":61.000000,\"schema\":1}"),
        "{second}"
    );
    for line in jsonl.lines() {
        let (mut object, mut row) = (serde_json::from_str::<serde_json::Value>(line).unwrap(), vec![]);
        assert_eq!(object["schema"], 1);
        object.as_object_mut().unwrap().remove("schema");
        assert!(
            object.as_object().unwrap().keys().all(|key| lines[0].split(',').any(|column| column == key))
        );
        parsed::<MetricsLine>(line).unwrap().write_csv(&mut row).unwrap();
        assert!(csv.contains(str::from_utf8(&row).unwrap()), "{line}");
    }
    let first = "{\"step\":0,\"epoch\":0,\"loss\":2.5,\"lr\":0.001,\"images_per_second\":8.000000,";
    assert!(jsonl.starts_with(first), "{jsonl}");
}

/// Killed after step 7, with a line cut short or rubbish at the end, and resumed from every step it may have saved.
#[test]
fn a_resumed_run_leaves_the_files_of_an_uninterrupted_one() {
    let whole = uninterrupted("whole", 10).files();
    let torn: [(&[u8], &[u8]); 5] = [
        (b"", b""),
        (b"{\"step\":8,\"epoch\":2,\"lo", b"8,2,1.7"),
        (b"{\"step\":1,\"epo", b"1"),
        (b"{\"step\":1,\"epoch\":\n\0\0\xff\n", b"1,2\n\0\0\xff\n"),
        (b"{\"step\":8}", b"8,2,1.7,0.001,1234.5,0.3,0.1,,,,,,,,,,,,,,,,,"),
    ];
    for (i, (jsonl, csv)) in torn.into_iter().enumerate() {
        for next in 0..=8 {
            let folder = uninterrupted(&format!("torn-{i}-{next}"), 8);
            folder.tear(jsonl, csv);
            let (mut metrics, lost) = Metrics::resume(&folder.0, next).unwrap();
            write(&mut metrics, next..10);
            assert_eq!(folder.files(), whole, "ending {i}, from step {next}");
            // A line cut short at the end is no damage, whatever else is there is.
            assert_eq!(lost.len(), usize::from(i == 3), "{lost:?}");
        }
    }
}

#[test]
fn a_missing_file_is_made_up_for() {
    let whole = uninterrupted("complete", 10).files();
    let folder = uninterrupted("no-table", 8);
    fs::remove_file(csv_path(&folder.0)).unwrap();
    let (mut metrics, lost) = Metrics::resume(&folder.0, 6).unwrap();
    write(&mut metrics, 6..10);
    assert_eq!((folder.files(), lost), (whole.clone(), vec![]));

    // Lines that a full disk kept out of the table.
    let folder = uninterrupted("short-table", 8);
    let table: String = folder.files()[1].lines().take(3).flat_map(|line| [line, "\n"]).collect();
    fs::write(csv_path(&folder.0), table).unwrap();
    write(&mut Metrics::resume(&folder.0, 6).unwrap().0, 6..10);
    assert_eq!(folder.files(), whole);

    let folder = uninterrupted("no-objects", 8);
    fs::remove_file(jsonl_path(&folder.0)).unwrap();
    let (mut metrics, lost) = Metrics::resume(&folder.0, 6).unwrap();
    write(&mut metrics, 6..10);
    assert!(lost[0].ends_with("metrics.jsonl is missing: the metrics of 6 steps are lost"));
    let [jsonl, csv, _] = folder.files();
    assert_eq!(csv, whole[1], "the table is kept");
    assert!(jsonl.starts_with("{\"step\":6,") && whole[0].ends_with(&jsonl));
}

/// What an interrupted resume leaves aside is in nobody's way.
#[test]
fn a_file_left_aside_is_overwritten() {
    let whole = uninterrupted("as-before", 4).files();
    let folder = uninterrupted("aside", 4);
    fs::write(folder.0.join(".metrics.jsonl.tmp"), "half a fi").unwrap();
    assert!(Metrics::resume(&folder.0, 4).unwrap().1.is_empty());
    assert_eq!(folder.files(), whole);
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 3);
}

#[test]
fn damaged_and_lost_lines_are_said_in_a_line() {
    let said = |name: &str, damage: fn(&str) -> String| {
        let folder = uninterrupted(name, 8);
        let path = jsonl_path(&folder.0);
        fs::write(&path, damage(&fs::read_to_string(&path).unwrap())).unwrap();
        Metrics::resume(&folder.0, 7).unwrap().1.join("|")
    };
    assert_eq!(said("sound", |text| text.to_string()), "");
    let line = said("step-damaged", |text| text.replace("{\"step\":3,", "{\"stop\":3,"));
    assert!(
        line.ends_with("is damaged: the metrics of 1 of 7 steps are lost, the first of step 3"),
        "{line}"
    );
    let line = said("cut", |text| text.lines().take(2).flat_map(|line| [line, "\n"]).collect());
    assert!(line.ends_with("the metrics of 5 of 7 steps are lost, the first of step 2"), "{line}");
    let line = said("beside", |text| format!("x\n{text}"));
    assert!(line.ends_with("is damaged: lines that can't be read are dropped: 1"), "{line}");
}

#[test]
fn metrics_that_are_removed_under_way_end_the_run() {
    let folder = Folder::new("removed");
    let mut metrics = Metrics::create(&folder.0).unwrap();
    write(&mut metrics, 0..2);
    fs::remove_file(jsonl_path(&folder.0)).unwrap();
    let error = metrics.sync().unwrap_err().to_string();
    assert!(error.contains("metrics.jsonl"), "{error}");
}
