use super::attention::key_for;
use super::*;
use crate::action::{Attention, AttentionBackward, AttentionForward};
use graph::DType;

#[test]
fn algorithms_survive_their_text() {
    let data = [0, 1, u64::MAX, 0x1234_5678_9abc_def0, 4, 5, 6, 7];
    assert_eq!(parse(&words(&data)), Some(data));
    assert_eq!(parse("00"), None);
    assert_eq!(parse(&"x".repeat(128)), None);
}

fn large() -> Matmul {
    let matrix = |rows, columns| Matrix::new(256, DType::Bf16, rows, columns);
    Matmul {
        left: matrix(50432, 768),
        left_transposed: false,
        right: matrix(2304, 768),
        right_transposed: true,
        result: matrix(50432, 2304),
        accumulate: false,
        epilogue: Epilogue::Bias(512),
        tf32: false,
    }
}

#[test]
fn ways_of_our_own_survive_their_text() {
    let (matmul, facts) = (large(), Facts::h200());
    let cuts = hopper::candidates(&matmul, &facts);
    assert!(!cuts.is_empty());
    for cut in cuts {
        let text = entry(&MatmulImpl::Own(cut));
        assert_eq!(kept(&text, &matmul, &facts), Some(CacheEntry::Own(cut)), "{text}");
        // Elsewhere it is measured again.
        let older = Facts { capability: (8, 0), ..facts.clone() };
        assert_eq!(kept(&text, &matmul, &older), None);
        assert_eq!(kept(&text, &Matmul { accumulate: true, ..matmul }, &facts), None);
    }
    assert!(kept("own 128x192x4 2 8", &matmul, &facts).is_some());
    for text in ["own ", "own 128x512x4 1 1", "128x192x4 2 8", ""] {
        assert_eq!(kept(text, &matmul, &facts), None, "{text}");
    }
    let data = [7; 8];
    assert_eq!(kept(&words(&data), &matmul, &facts), Some(CacheEntry::Library(data)));
}

#[test]
fn the_fastest_of_several_runs_is_taken() {
    // The third one was held up when it was first timed, and the last two are out of the running at once.
    let first = vec![2.3, 2.4, 2.6, 9.0, 8.0];
    let then = [2.3, 2.4, 2.0, 0.0, 0.0];
    let mut runs = [0; 5];
    let mut time = |i: usize| {
        runs[i] += 1;
        Ok(then[i])
    };
    assert_eq!(fastest(first, &mut time).unwrap(), Some(2));
    assert!(runs[0] >= 1 && runs[2] >= 2 && runs[3] + runs[4] == 0, "{runs:?}");
    assert!(runs.iter().sum::<usize>() <= 3 + 3 * 2, "{runs:?}");
    assert_eq!(fastest(vec![], |_| Ok(0.0)).unwrap(), None);
    // What is clear is not timed again.
    assert_eq!(fastest(vec![3.0, 1.0], |_| unreachable!()).unwrap(), Some(1));
}

fn nothing_known() -> KnownAlgorithms {
    KnownAlgorithms {
        deterministic: false,
        attention_by: None,
        facts: Facts::h200(),
        entries: BTreeMap::new(),
        file: "products-a.json".into(),
        changed: false,
    }
}

#[test]
fn choices_of_another_gpu_are_not_taken_over() {
    let mut known = nothing_known();
    let algorithms = BTreeMap::from([(key(&large()), "own 128x192x4 2 8".to_string())]);
    let mine = AlgorithmChoices { gpu: "H200".into(), of: "products-a.json".into(), algorithms };
    assert!(!known.adopt(&AlgorithmChoices { of: "products-b.json".into(), ..mine.clone() }));
    let all = known.kernels(&large()).len();
    assert!(all > 1);
    assert!(known.adopt(&mine));
    assert_eq!(known.kernels(&large()).len(), 1);
    known.deterministic = true;
    assert!(!known.adopt(&mine) && known.kernels(&large()).is_empty());
}

#[test]
fn keys_distinguish_matmuls() {
    let matrix = |rows, columns| Matrix::new(256, DType::Bf16, rows, columns);
    let base = Matmul {
        left: matrix(8, 4),
        left_transposed: false,
        right: matrix(16, 4),
        right_transposed: true,
        result: matrix(8, 16),
        accumulate: false,
        epilogue: Epilogue::None,
        tf32: false,
    };
    let far = Matmul { left: Matrix { address: 16, ..base.left }, ..base };
    let others = [
        Matmul { accumulate: true, ..base },
        Matmul { epilogue: Epilogue::Bias(512), ..base },
        Matmul { tf32: true, ..base },
        Matmul { result: Matrix { dtype: DType::F32, ..base.result }, ..base },
        far,
    ];
    for other in others {
        assert_ne!(key(&base), key(&other));
    }
    assert_eq!(key(&base), key(&Matmul { left: Matrix { address: 512, ..base.left }, ..base }));
}

fn attention() -> Attention {
    let gradient = Some(AttentionBackward { dout: 256, dqkv: 512, deltas: 768 });
    let (batch, tokens, heads, head, dtype) = (1, 1025, 12, 64, DType::Bf16);
    let attended =
        AttentionForward { batch, tokens, heads, head, dtype, qkv: 256, out: 512, log_sums: 768, gradient };
    let kernel = Kernel::new(Source::AttentionFlashGrad, "flash_grad<bf16, 64>");
    let launch = Launch { kernel, grid: [1; 3], block: 384, shared: 0, args: vec![] };
    Attention { attended, own: vec![launch.clone()], after: Some(launch) }
}

#[test]
fn keys_tell_attention_apart() {
    let base = attention();
    let key = |of: &Attention| key_for(of, 91900);
    let changed = |change: &dyn Fn(&mut Attention)| {
        let mut other = base.clone();
        change(&mut other);
        key(&other)
    };
    let others = [
        changed(&|of| of.attended.batch = 2),
        changed(&|of| of.attended.dtype = DType::F16),
        changed(&|of| of.attended.gradient = None),
        changed(&|of| of.after = None),
        changed(&|of| of.own[0].kernel.name = "flash_grad<bf16, 128>".into()),
        changed(&|of| of.own[0].kernel.source = Source::AttentionFlash),
        key_for(&base, 92000),
    ];
    for other in others {
        assert_ne!(key(&base), other);
    }
    // Where it lies doesn't matter.
    assert_eq!(key(&base), changed(&|of| of.attended.qkv = 4096));
}

#[test]
fn choices_of_attention_are_kept_with_those_of_matmuls() {
    let mut known = nothing_known();
    let key = key_for(&attention(), 91900);
    for (text, is_known) in [("own", true), ("cudnn 1 engine 6", true), ("cudnn", false), ("ours", false)] {
        let algorithms = BTreeMap::from([(key.clone(), text.to_string())]);
        let choices = AlgorithmChoices { gpu: "H200".into(), of: "products-a.json".into(), algorithms };
        assert!(known.adopt(&choices));
        assert_eq!(known.attention(&key), is_known.then_some(text));
    }
    known.deterministic = true;
    assert!(!known.adopt(&AlgorithmChoices::default()));
}
