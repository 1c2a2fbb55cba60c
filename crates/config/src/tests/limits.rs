//! What can't be, and what could change nothing, is refused when a run is resolved.

use super::*;
use models::{Head, Network, Segmenter};

/// The limits are those of `data`, which the loader goes by.
#[test]
fn what_no_loader_could_do_is_refused() {
    let rand = |operations, magnitude| Some(RandAugment { operations, magnitude });
    let raw = Raw::default;
    let cases = [
        (Raw { mixup: Some(0.0001), ..raw() }, "--mixup 0.0001: must be from 0.001 to 1000: or 0, for none"),
        (Raw { cutmix: Some(1e4), ..raw() }, "--cutmix 10000: must be from 0.001 to 1000: or 0, for none"),
        (
            Raw { rand_augment: rand(9, 9), ..raw() },
            "--rand-augment 9,9: at most 8 operations are done to an image",
        ),
        (Raw { rand_augment: rand(0, 31), ..raw() }, "--rand-augment 0,31: magnitudes go up to 30"),
        (
            Raw { rand_augment: rand(2, 9), channels: Some(2), ..raw() },
            "--rand-augment 2,9: its colour operations need 1 or 3 channels; the images have 2",
        ),
        (
            Raw { eval_resize: Some(20_000), ..raw() },
            "--eval-resize 20000: must be from 32 to 16384: the model reads 32 px of it",
        ),
        (
            Raw { mean: vec![1001.0], ..raw() },
            "--mean 1001: must be from -1000 to 1000, of values from 0 to 1",
        ),
        (Raw { threads: Some(5000), ..raw() }, "--threads 5000: must be at most 4096"),
        (
            Raw { task: Some(Task::Segment), image_size: Some(8192), ..raw() },
            "--image-size 8192: images would be fitted into a box with sides up to 32768 px, and 16384 is the most",
        ),
        (
            Raw { task: Some(Task::Segment), batch_size: Some(1), ..raw() },
            "--batch-size 1: batch norm takes moments over at least two images of a rank",
        ),
    ];
    for (raw, expected) in cases {
        assert_eq!(refused(raw), expected);
    }
    assert!(refused(Raw { lr: Some(1e39), ..raw() }).ends_with("0: is more than fp32 holds"));
}

/// `config/idle.rs` has the rule.
#[test]
fn flags_that_could_change_nothing_are_refused() {
    let raw = Raw::default;
    let masks = || Raw { task: Some(Task::Segment), ..Raw::default() };
    let scale = LrScale { pattern: "*".into(), factor: 0.0 };
    let cases = [
        (
            Raw { epochs: Some(3), steps: Some(7), ..raw() },
            "--epochs 3: --steps 7 says how long the run is: leave out one of them",
        ),
        (
            Raw { eval_stride: Some(9), ..masks() },
            "--eval-stride 9: is for --eval-mode slide; this run's is whole, which has no windows",
        ),
        (Raw { keep: Some(3), ..raw() }, "--keep 3: needs --out: without it nothing is kept"),
        (
            Raw { checkpoint_every: Some(3), ..raw() },
            "--checkpoint-every 3: needs --out: without it nothing is kept",
        ),
        (
            Raw { balance: true, no_account: true, ..raw() },
            "--balance: goes by measured times, and --no-account measures none",
        ),
        (
            Raw { trace: Some("t.json".into()), no_account: true, ..raw() },
            "--trace t.json: shows measured times, and --no-account measures none",
        ),
        (
            Raw { no_decay: vec!["head".into()], weight_decay: Some(0.0), ..raw() },
            "--no-decay head: nothing decays: --weight-decay is 0",
        ),
        (
            Raw { interpolation: Some(Interpolation::Bicubic), ..raw() },
            "--interpolation bicubic: no image is resized: --data synthetic has images of 32 px",
        ),
        (Raw { lr_scale: vec![scale], ..raw() }, "--lr-scale *=0: leaves no parameter that learns"),
    ];
    for (raw, expected) in cases {
        assert_eq!(refused(raw), expected);
    }
    // One command line serves any number of ranks, and any length of a run.
    for raw in [
        Raw {
            bucket_size: Some(9),
            no_overlap: true,
            comm_dtype: Some(CommDtype::Bf16),
            balance: true,
            ..raw()
        },
        Raw { schedule: Some(Form::Step), milestones: vec![Span::Epochs(30.0)], steps: Some(2), ..raw() },
        Raw { cache: Some(Cache::Off), skip_bad_images: true, deterministic: true, ..raw() },
        Raw { interpolation: Some(Interpolation::Bicubic), crop: Some(Crop::Resized), ..raw() },
    ] {
        raw.resolve(&Facts::synthetic(&raw).unwrap(), 1).unwrap();
    }
}

/// A run that goes on may be told another length, in either word.
#[test]
fn what_is_told_now_takes_the_place_of_what_was_told() {
    let earlier = Raw { epochs: Some(3), eval_stride: Some(9), ..Raw::default() };
    let now = Raw { steps: Some(7), eval_mode: Some(EvalMode::Whole), ..Raw::default() };
    let both = now.or(earlier.clone());
    assert_eq!((both.epochs, both.steps, both.eval_stride), (None, Some(7), None));
    let slides = Raw { eval_mode: Some(EvalMode::Slide), ..Raw::default() }.or(earlier.clone());
    assert_eq!(slides.eval_stride, Some(9));
    let same = Raw::default().or(earlier);
    assert_eq!((same.epochs, same.steps, same.eval_stride), (Some(3), None, Some(9)));
}

/// As published the backbone has no dropout and the heads have 0.1; the flag is the heads'.
#[test]
fn dropout_of_upernet_is_that_of_its_heads() {
    let rates = |dropout| {
        let raw = Raw { task: Some(Task::Segment), dropout, ..Raw::default() };
        let network = raw.resolve_without_data(1).unwrap().network;
        match (&network, network.backbone()) {
            (Network::Segmenter(Segmenter { head: Head::Upernet(upernet), .. }), Network::Swin(swin)) => {
                (swin.dropout, upernet.dropout)
            }
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(
        [None, Some(0.0), Some(0.1), Some(0.3)].map(rates),
        [(0.0, 0.1), (0.0, 0.0), (0.0, 0.1), (0.0, 0.3)]
    );
}

#[test]
fn the_last_batch_of_an_epoch_is_left_out_on_demand() {
    let small = |raw: Raw| Raw { train_samples: Some(20), batch_size: Some(8), epochs: Some(1), ..raw };
    let short = plain(small(Raw::default()));
    let whole = plain(small(Raw { drop_last: true, ..Raw::default() }));
    assert_eq!((short.steps, whole.steps), (3, 2));
    assert_eq!(whole.images_of_step(1), 8);
    let differences = whole.differences(&short);
    assert!(differences.contains(&"drop_last is true, was false".to_string()), "{differences:?}");
    let of_file = small(file("ds.json", "{\"dataloader_drop_last\": true}"));
    assert_eq!(plain(of_file.clone()).steps, 2);
    let explained = of_file.explain(&Facts::synthetic(&of_file).unwrap(), 1);
    assert_eq!(explained.keys[0].verdict, Verdict::Honoured("--drop-last true".to_string()));
    let note = explained.settings.iter().find(|note| note.name == "drop-last").unwrap();
    assert_eq!(note.origin, Origin::File("dataloader_drop_last".to_string()));
    let none = refused(Raw { train_samples: Some(7), ..small(Raw { drop_last: true, ..Raw::default() }) });
    assert!(none.starts_with("--drop-last: leaves nothing of"), "{none}");
}
