use super::*;
use crate::spec::Asked;

/// A machine of four cores with a set of 1000 images.
struct Plain;

impl Resolve for Plain {
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
        let images = (1000.0 * number("--data-fraction").unwrap_or(1.0)).round() as u64;
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
    Experiment {
        kind: Some(kind),
        ranks: Some(ranks.to_vec()),
        batch_sizes: Some(vec![32]),
        ..Experiment::default()
    }
}

fn planned(experiment: Experiment) -> Result<Vec<Planned>, String> {
    let study = Asked { common: experiment, ..Asked::default() }.study().unwrap();
    plan(&study, &mut Plain).map_err(|e| e.to_string())
}

/// (ranks, batch a rank, global batch, images)
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

#[test]
fn weak_scaling_can_say_how_much_of_the_data_a_rank_has() {
    let tenth =
        |ranks: &[usize]| Experiment { data_fractions: Some(vec![0.1]), ..experiment(Kind::Weak, ranks) };
    let images: Vec<u64> =
        planned(tenth(&[1, 2, 4])).unwrap().iter().map(|p| p.settings.images_per_epoch).collect();
    assert_eq!(images, [100, 200, 400]);
    let half = Experiment { data_fractions: Some(vec![0.5]), ..experiment(Kind::Weak, &[1, 4]) };
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
        plan(&study, &mut Plain).map_err(|e| e.to_string())
    };
    let points = on(&names).unwrap();
    assert_eq!(on(&names[..2]).unwrap_err(), "nodes over 4 ranks: 4 hosts, but only 2 are named");
    assert!(on(&[]).unwrap_err().contains("no --hosts, --hostfile or --launcher to reach them"));
    let places: Vec<_> = points.iter().map(|p| (p.settings.ranks, p.settings.hosts)).collect();
    assert_eq!(places, [(1, 1), (2, 1), (2, 2), (4, 1), (4, 4)]);
    assert!(points[1].series.ends_with("one host") && points[2].series.ends_with("one rank a host"));
}

#[test]
fn series_are_named_by_what_tells_them_apart() {
    let grid = Experiment {
        batch_sizes: Some(vec![16, 64]),
        models: Some(vec!["vit-ti/4".into()]),
        ..experiment(Kind::FixedPerRank, &[1, 2])
    };
    let series: Vec<String> = planned(grid).unwrap().into_iter().map(|p| p.series).collect();
    let expected = ["vit-ti/4 · batch 16", "vit-ti/4 · batch 64"];
    assert_eq!(series, [expected[0], expected[1], expected[0], expected[1]]);
    let batch = Experiment { batch_sizes: Some(vec![16, 64]), ..experiment(Kind::Batch, &[1, 2]) };
    let series: HashSet<String> = planned(batch).unwrap().into_iter().map(|p| p.series).collect();
    assert_eq!(
        series,
        HashSet::from(["vit-nano/4 · 1 rank".to_string(), "vit-nano/4 · 2 ranks".to_string()])
    );
    // Experiments of a kind lie in the same figures.
    let on = |data: &str| Experiment { data: Some(vec![data.into()]), ..experiment(Kind::Strong, &[1, 2]) };
    let experiments = vec![on("cifar10:/data"), on("folder:/data/photos")];
    let study = Asked { experiments, ..Asked::default() }.study().unwrap();
    let series: Vec<String> = plan(&study, &mut Plain).unwrap().into_iter().map(|p| p.series).collect();
    assert_eq!(
        (series[0].as_str(), series[2].as_str()),
        ("vit-nano/4 · cifar10", "vit-nano/4 · folder.photos")
    );
}

#[test]
fn names_are_the_same_whenever_and_wherever_a_study_is_planned() {
    let on = |data: &str| Experiment { data: Some(vec![data.into()]), ..experiment(Kind::Strong, &[1, 2]) };
    let ids = |points: Vec<Planned>| points.into_iter().map(|p| p.id).collect::<Vec<_>>();
    let here = ids(planned(on("cifar10:/data")).unwrap());
    assert_eq!(here, ids(planned(on("cifar10:elsewhere")).unwrap()));
    assert!(here[1].starts_with("strong-vit-nano.4-cifar10-r2-t2-b16-a1-adamw-fp32-"), "{here:?}");
    let longer = Experiment { epochs: Some(2), ..on("cifar10:/data") };
    assert_ne!(here, ids(planned(longer).unwrap()));
    let twice = Experiment { ranks: Some(vec![2, 2]), ..on("cifar10:a") };
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
        "strong over 8 ranks: 8 × 1 thread on 4 cores: --oversubscribe says that this is meant"
    );
    let meant = Asked { oversubscribe: true, common: experiment(Kind::Strong, &[4, 8]), ..Asked::default() };
    let points = plan(&meant.study().unwrap(), &mut Plain).unwrap();
    assert!(!points[0].oversubscribed && points[1].oversubscribed);
    let short = Experiment { steps: Some(3), ..experiment(Kind::Strong, &[1]) };
    assert_eq!(refused(short), "strong over 1 rank: a warm-up of 3 steps leaves none of 3 to count");
    let own = Asked { train: vec!["--out=x".into()], ..Asked::default() }.study().unwrap();
    let text = plan(&own, &mut Plain).unwrap_err().to_string();
    assert!(text.contains("--out=x is the study's own"), "{text}");
}
