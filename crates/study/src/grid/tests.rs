use super::*;
use crate::axes::{Axes, AxisValue, DATA, DATA_FRACTIONS, MODELS, THREADS};
use crate::spec::Asked;

/// A machine of four cores with a set of so many images.
struct Here(u64);

impl Resolve for Here {
    fn facts(&mut self, options: &[String], ranks: usize) -> Result<Facts, String> {
        let number = |name: &str| option(options, name).map(|x| x.parse::<f64>().unwrap());
        let accumulation = number("--accumulate").unwrap_or(1.0) as usize;
        let batch = match number("--global-batch") {
            Some(total) if !(total as usize).is_multiple_of(ranks * accumulation) => {
                return Err(format!("--global-batch {total} is no multiple of {ranks} ranks"));
            }
            Some(total) => total as usize / ranks / accumulation,
            None => number("--batch-size").unwrap_or(64.0) as usize,
        };
        let images = (self.0 as f64 * number("--data-fraction").unwrap_or(1.0)).round() as u64;
        let steps = images.div_ceil((batch * accumulation * ranks) as u64);
        Ok(Facts {
            data: "synthetic".to_string(),
            task: "classification".into(),
            image_size: 32,
            loader_threads: 1,
            batch_per_rank: batch,
            accumulation,
            model: option(options, "--model").cloned().unwrap_or("vit-nano/4".into()),
            optimizer: option(options, "--optimizer").cloned().unwrap_or("adamw".into()),
            precision: "fp32".into(),
            device: "cpu".into(),
            images_of_set: self.0,
            images_per_epoch: images,
            epochs: 1,
            steps: number("--steps").map_or(steps, |s| s as u64),
            estimate: None,
        })
    }

    fn cores(&self) -> usize {
        4
    }

    fn gpus(&self) -> usize {
        0
    }
}

fn experiment(kind: Kind, ranks: &[usize]) -> Experiment {
    let axes = Axes::default().with(RANKS, ranks.to_vec()).with(BATCH_SIZES, [32]);
    Experiment { kind: Some(kind), axes, ..Experiment::default() }
}

/// An experiment with these values on an axis.
fn with<V: Into<AxisValue>>(
    experiment: Experiment,
    key: &'static str,
    values: impl IntoIterator<Item = V>,
) -> Experiment {
    Experiment { axes: experiment.axes.with(key, values), ..experiment }
}

fn planned(experiment: Experiment) -> Result<Vec<Planned>, String> {
    let study = Asked { common: experiment, ..Asked::default() }.study().unwrap();
    plan(&study, &mut Here(1000)).map_err(|e| e.to_string())
}

/// (ranks, batch per rank, global batch, images)
fn shape(points: &[Planned]) -> Vec<(usize, usize, usize, u64)> {
    let of = |s: &Settings| (s.ranks, s.batch_per_rank, s.global_batch, s.images_per_epoch);
    points.iter().map(|point| of(&point.settings)).collect()
}

#[test]
fn each_kind_holds_constant_what_its_name_says() {
    let strong = planned(experiment(Kind::Strong, &[1, 2, 4])).unwrap();
    assert_eq!(shape(&strong), [(1, 32, 32, 1000), (2, 16, 32, 1000), (4, 8, 32, 1000)]);
    let weak = planned(experiment(Kind::Weak, &[1, 2, 4])).unwrap();
    assert_eq!(shape(&weak), [(1, 32, 32, 250), (2, 32, 64, 500), (4, 32, 128, 1000)]);
    let fixed = planned(experiment(Kind::FixedPerRank, &[1, 2, 4])).unwrap();
    assert_eq!(shape(&fixed), [(1, 32, 32, 1000), (2, 32, 64, 1000), (4, 32, 128, 1000)]);
    let by_steps = Experiment { steps: Some(16), ..experiment(Kind::FixedPerRank, &[1, 4]) };
    let steps: Vec<u64> = planned(by_steps).unwrap().iter().map(|p| p.settings.steps).collect();
    assert_eq!(steps, [16, 4], "the same images by fewer steps");
    // Every rank has the threads that fit when all ranks are there.
    assert!([strong, weak, fixed].iter().flatten().all(|p| p.settings.threads_per_rank == 1));
    let two = planned(experiment(Kind::Strong, &[1, 2])).unwrap();
    assert!(two.iter().all(|p| p.settings.threads_per_rank == 2));
}

/// What each kind holds constant, without a batch, with accumulation, by steps, and for ranks that are no powers of two.
#[test]
fn what_a_kind_holds_is_held_whatever_is_left_out() {
    let bare = |kind, ranks: &[usize]| {
        let axes = Axes::default().with(RANKS, ranks.to_vec());
        Experiment { kind: Some(kind), axes, warmup: Some(0), ..Experiment::default() }
    };
    let accumulated = |one: Experiment, values: Option<Vec<usize>>| match values {
        Some(values) => with(one, ACCUMULATION, values),
        None => one,
    };
    for kind in [Kind::Strong, Kind::Weak, Kind::FixedPerRank] {
        for ranks in [&[1, 2, 4][..], &[1, 3], &[2, 3, 4], &[3]] {
            for (accumulation, steps) in
                [(None, None), (Some(vec![2]), None), (Some(vec![1, 3]), None), (None, Some(24))]
            {
                let asked = Experiment { steps, ..accumulated(bare(kind, ranks), accumulation.clone()) };
                let points = planned(asked).unwrap();
                let which =
                    format!("{kind:?} over {ranks:?}, accumulation {accumulation:?}, steps {steps:?}");
                for point in &points {
                    let base = points.iter().find(|base| base.series == point.series).unwrap();
                    let (a, b) = (&base.settings, &point.settings);
                    let of_rank = |s: &Settings| (s.batch_per_rank, s.accumulation);
                    let (ranks_a, ranks_b) = (a.ranks as u64, b.ranks as u64);
                    match kind {
                        Kind::Strong => {
                            assert_eq!(a.global_batch, b.global_batch, "{which}");
                            assert_eq!(
                                (a.images_per_epoch, a.steps),
                                (b.images_per_epoch, b.steps),
                                "{which}"
                            );
                        }
                        Kind::Weak => {
                            assert_eq!((of_rank(a), a.steps), (of_rank(b), b.steps), "{which}");
                            assert_eq!(a.images_per_epoch * ranks_b, b.images_per_epoch * ranks_a, "{which}");
                        }
                        _ => {
                            assert_eq!(of_rank(a), of_rank(b), "{which}");
                            assert_eq!(a.images_per_epoch, b.images_per_epoch, "{which}");
                            assert!(steps.is_none() || a.steps * ranks_a == b.steps * ranks_b, "{which}");
                        }
                    }
                }
            }
        }
    }
    // Of one rank, `vitesse train` takes 64 images; three ranks divide 66.
    let global = |ranks: &[usize], accumulation: Option<Vec<usize>>| {
        let points = planned(accumulated(bare(Kind::Strong, ranks), accumulation)).unwrap();
        points.iter().map(|point| point.settings.global_batch).collect::<HashSet<_>>()
    };
    assert_eq!(global(&[1, 2, 4], None), HashSet::from([64]));
    assert_eq!(global(&[1, 3], None), HashSet::from([66]));
    assert_eq!(global(&[1, 2], Some(vec![1, 3])), HashSet::from([66]), "accumulations are compared, too");
    let many = bare(Kind::Strong, &[7, 8, 9, 10, 11, 12, 13]);
    let refused = "strong: no batch of up to 1000 images can be divided among all these ranks; name one with --batch-sizes";
    assert_eq!(planned(many).unwrap_err(), refused);
    let all: Vec<usize> = (1..300).collect();
    assert_eq!(
        planned(bare(Kind::Strong, &all)).unwrap_err(),
        refused,
        "their common multiple can't be counted"
    );
    // From a file, on many hosts.
    let file = asked("kind = \"nodes\"\nranks = [1, 2]\nhosts = [\"a\", \"b\"]\n").unwrap();
    let nodes = plan(&file.study().unwrap(), &mut Here(1000)).unwrap();
    assert_eq!(shape(&nodes), [(1, 64, 64, 1000), (2, 32, 64, 1000), (2, 32, 64, 1000)]);
}

fn asked(text: &str) -> Result<Asked, StudyError> {
    let folder = testing::Folder::new("grid");
    Asked::read(&folder.file("study.toml", text))
}

/// Ranks of 333 images, not one of 333 and one of 334: with batches of 111 that would be a step more.
#[test]
fn weak_scaling_gives_every_rank_the_same_images() {
    let weak = Experiment { warmup: Some(0), ..with(experiment(Kind::Weak, &[1, 2, 3]), BATCH_SIZES, [111]) };
    let study = Asked { common: weak, ..Asked::default() }.study().unwrap();
    for images in 1000..1010 {
        let points = plan(&study, &mut Here(images)).unwrap();
        let each: Vec<u64> =
            points.iter().map(|p| p.settings.images_per_epoch / p.settings.ranks as u64).collect();
        assert_eq!(each, [images / 3; 3]);
        assert!(points.iter().all(|p| p.settings.images_per_epoch.is_multiple_of(p.settings.ranks as u64)));
        assert!(points.iter().all(|p| p.settings.steps == points[0].settings.steps), "{images}");
    }
}

#[test]
fn a_grid_has_a_limit_that_is_found_before_it_is_filled() {
    let numbers = || 1..300usize;
    let axes =
        Axes::default().with(RANKS, numbers()).with(BATCH_SIZES, numbers()).with(ACCUMULATION, numbers());
    let cube = Experiment { axes: axes.with(THREADS, [1; 1000]), ..Experiment::default() };
    let said = planned(cube.clone()).unwrap_err();
    assert_eq!(
        said,
        "299 ranks × 1000 threads × 299 batch sizes × 299 accumulations: a study has at most 2000 points"
    );
    // So many that their number overflows.
    let endless = with(with(cube, NODES, numbers()), PRECISIONS, vec!["fp32"; 1 << 20]);
    let endless = with(endless, OPTIMIZERS, vec!["sgd"; 1 << 20]);
    assert!(planned(endless).unwrap_err().ends_with("at most 2000 points"));
    // Together, and each of them small.
    let experiments = vec![experiment(Kind::Strong, &[1, 2, 4]); 700];
    let many = Asked { experiments, ..Asked::default() }.study().unwrap();
    assert!(plan(&many, &mut Here(1000)).unwrap_err().to_string().ends_with("at most 2000 points"));
    let often = |repeats| {
        let asked =
            Asked { repeats: Some(repeats), common: experiment(Kind::Strong, &[1, 2]), ..Asked::default() };
        plan(&asked.study().unwrap(), &mut Here(1000)).map(|points| points.len()).map_err(|e| e.to_string())
    };
    assert_eq!(often(50_000), Ok(2));
    let refused =
        |repeats: usize| Err(format!("2 points × {repeats} repeats: a study has at most 100000 runs"));
    assert_eq!((often(50_001), often(usize::MAX)), (refused(50_001), refused(usize::MAX)));
    // From a file, too, and no file is read that could only hold such a grid.
    let list = (1..300).map(|n| n.to_string()).collect::<Vec<_>>().join(", ");
    let text = format!("ranks = [{list}]\nbatch-sizes = [{list}]\naccumulation = [{list}]\n");
    let read = asked(&text).unwrap().study().unwrap();
    assert!(plan(&read, &mut Here(1000)).unwrap_err().to_string().starts_with("299 ranks × 299 batch sizes"));
    let long = asked(&format!("ranks = [{}1]", "1, ".repeat(1 << 20))).unwrap_err().to_string();
    assert!(long.ends_with("is longer than 1 MiB, and no study"), "{long}");
}

#[test]
fn weak_scaling_can_say_how_much_of_the_data_a_rank_has() {
    let tenth = |ranks: &[usize]| with(experiment(Kind::Weak, ranks), DATA_FRACTIONS, [0.1]);
    let images: Vec<u64> =
        planned(tenth(&[1, 2, 4])).unwrap().iter().map(|p| p.settings.images_per_epoch).collect();
    assert_eq!(images, [100, 200, 400]);
    let half = with(experiment(Kind::Weak, &[1, 4]), DATA_FRACTIONS, [0.5]);
    assert_eq!(planned(half).unwrap_err(), "weak: 4 ranks × 0.5 of the data each is more than there is");
}

#[test]
fn nodes_are_one_host_against_many() {
    let names = ["a", "b", "c", "d"].map(str::to_string);
    let on = |hosts: &[String]| {
        let launch = crate::spec::Launch { hosts: hosts.to_vec(), ..Default::default() };
        let study = Asked { common: experiment(Kind::Nodes, &[1, 2, 4]), launch, ..Asked::default() }
            .study()
            .unwrap();
        plan(&study, &mut Here(1000)).map_err(|e| e.to_string())
    };
    let points = on(&names).unwrap();
    assert_eq!(on(&names[..2]).unwrap_err(), "nodes over 4 ranks: 4 hosts, but only 2 are named");
    assert!(on(&[]).unwrap_err().contains("no --hosts, --hostfile or --launcher to reach them"));
    let places: Vec<_> = points.iter().map(|p| (p.settings.ranks, p.settings.hosts)).collect();
    assert_eq!(places, [(1, 1), (2, 1), (2, 2), (4, 1), (4, 4)]);
    assert!(points[1].series.ends_with("one host") && points[2].series.ends_with("one rank per host"));
}

#[test]
fn series_are_named_by_what_differs() {
    let grid = with(experiment(Kind::FixedPerRank, &[1, 2]), BATCH_SIZES, [16, 64]);
    let grid = with(grid, MODELS, ["vit-ti/4"]);
    let series: Vec<String> = planned(grid).unwrap().into_iter().map(|p| p.series).collect();
    let expected = ["vit-ti/4 · batch 16", "vit-ti/4 · batch 64"];
    assert_eq!(series, [expected[0], expected[1], expected[0], expected[1]]);
    let batch = with(experiment(Kind::Batch, &[1, 2]), BATCH_SIZES, [16, 64]);
    let series: HashSet<String> = planned(batch).unwrap().into_iter().map(|p| p.series).collect();
    assert_eq!(
        series,
        HashSet::from(["vit-nano/4 · 1 rank".to_string(), "vit-nano/4 · 2 ranks".to_string()])
    );
    // Experiments of a kind lie in the same figures.
    let on = |data: &str| with(experiment(Kind::Strong, &[1, 2]), DATA, [data]);
    let experiments = vec![on("cifar10:/data"), on("folder:/data/photos")];
    let study = Asked { experiments, ..Asked::default() }.study().unwrap();
    let series: Vec<String> = plan(&study, &mut Here(1000)).unwrap().into_iter().map(|p| p.series).collect();
    assert_eq!(
        (series[0].as_str(), series[2].as_str()),
        ("vit-nano/4 · cifar10", "vit-nano/4 · folder.photos")
    );
}

#[test]
fn an_axis_without_a_field_of_its_own_names_options_series_and_points() {
    let grid = with(experiment(Kind::Strong, &[1, 2]), "bucket-sizes", [4096, 65536]);
    let points = planned(grid).unwrap();
    let series: Vec<&str> = points.iter().map(|point| point.series.as_str()).collect();
    let expected = ["vit-nano/4 · buckets of 4096", "vit-nano/4 · buckets of 65536"];
    assert_eq!(series, [expected, expected].concat());
    for (point, size) in points.iter().zip(["4096", "65536"].into_iter().cycle()) {
        assert_eq!(option(&point.options, "--bucket-size").unwrap(), size);
        assert_eq!(point.settings.other["bucket-sizes"], size);
    }
    assert_eq!(points.iter().map(|point| &point.id).collect::<HashSet<_>>().len(), 4);
    let file = asked("kind = \"grid\"\nranks = 2\nbucket-sizes = [1024, 2048]\n").unwrap();
    assert_eq!(plan(&file.study().unwrap(), &mut Here(1000)).unwrap().len(), 2);
}

#[test]
fn names_are_the_same_whenever_and_wherever_a_study_is_planned() {
    let on = |data: &str| with(experiment(Kind::Strong, &[1, 2]), DATA, [data]);
    let ids = |points: Vec<Planned>| points.into_iter().map(|p| p.id).collect::<Vec<_>>();
    let here = ids(planned(on("cifar10:/data")).unwrap());
    assert_eq!(here, ids(planned(on("cifar10:elsewhere")).unwrap()));
    assert!(here[1].starts_with("strong-vit-nano.4-cifar10-r2-t2-b16-a1-adamw-fp32-"), "{here:?}");
    let longer = Experiment { epochs: Some(2), ..on("cifar10:/data") };
    assert_ne!(here, ids(planned(longer).unwrap()));
    let twice = with(on("cifar10:a"), RANKS, [2, 2]);
    assert_eq!(planned(twice).unwrap().len(), 1);
}

#[test]
fn what_can_not_be_is_refused_before_anything_runs() {
    let refused = |experiment| planned(experiment).unwrap_err();
    assert_eq!(
        refused(experiment(Kind::Strong, &[1, 3])),
        "strong over 3 ranks: --global-batch 32 is no multiple of 3 ranks"
    );
    assert_eq!(
        refused(experiment(Kind::Strong, &[8])),
        "strong over 8 ranks: 8 × 1 thread on 4 cores; --oversubscribe allows it"
    );
    let meant = Asked { oversubscribe: true, common: experiment(Kind::Strong, &[4, 8]), ..Asked::default() };
    let points = plan(&meant.study().unwrap(), &mut Here(1000)).unwrap();
    assert!(!points[0].oversubscribed && points[1].oversubscribed);
    let short = Experiment { steps: Some(3), ..experiment(Kind::Strong, &[1]) };
    assert_eq!(refused(short), "strong over 1 rank: a warm-up of 3 steps leaves none of 3 to count");
    let own = Asked { train: vec!["--out=x".into()], ..Asked::default() }.study().unwrap();
    let text = plan(&own, &mut Here(1000)).unwrap_err().to_string();
    assert!(text.contains("--out=x is the study's own"), "{text}");
}

#[test]
fn stages_of_zero_are_points_of_a_series_for_each_number_of_ranks() {
    let grid = with(experiment(Kind::Zero, &[2, 4]), "zero", [0, 3]);
    let points = planned(grid).unwrap();
    let series: HashSet<&str> = points.iter().map(|point| point.series.as_str()).collect();
    assert_eq!(series, HashSet::from(["vit-nano/4 · 2 ranks", "vit-nano/4 · 4 ranks"]));
    let stages = points.iter().map(|point| option(&point.options, "--zero").unwrap().as_str());
    assert_eq!(stages.collect::<Vec<_>>(), ["0", "3", "0", "3"]);
    assert!(points.iter().all(|point| point.settings.batch_per_rank == points[0].settings.batch_per_rank));
}
