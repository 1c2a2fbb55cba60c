//! How ranks all-reduce gradients.

use super::choice::{Precision, choice};
use super::origin::{Log, Origin};
use super::resolve::at_least_one;
use super::settings::Raw;
use crate::ConfigError;
use crate::deepspeed::{DeepSpeed, Setting};
use graph::DType;
use models::Network;
use serde::{Deserialize, Serialize};

choice! {
    /// Type that gradients are all-reduced in.
    CommDtype {
        Fp32 = "fp32",
        Bf16 = "bf16",
        Fp16 = "fp16",
    }
}

/// Elements of a bucket: a few milliseconds of a common network, and a fraction of a block of ViT-B.
const BUCKET: usize = 1 << 20;

/// Buckets that even a small model has, so that the first leaves early in the backward pass. Two hosts a gigabit apart train ViT-nano
/// 11% faster with two buckets than with one, and with nine no faster.
const BUCKETS: usize = 3;

/// All-reduce of gradients. It changes nothing about what is computed, but for rounding.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllReduce {
    /// Elements that are all-reduced at once; a larger gradient is sent alone.
    pub bucket: usize,
    /// Overlaps with the backward pass.
    pub overlap: bool,
    /// Communication dtype, if it is not that of the gradients.
    #[serde(alias = "wire")]
    pub dtype: Option<CommDtype>,
    /// Divisor of a rank's mean before the all-reduce; the rest of the mean over all ranks is divided afterwards.
    pub predivide: f64,
}

/// That of a run on one rank.
impl Default for AllReduce {
    fn default() -> Self {
        AllReduce { bucket: BUCKET, overlap: true, dtype: None, predivide: 1.0 }
    }
}

impl AllReduce {
    /// Type that gradients are converted to, if they are.
    pub fn sent_as(&self) -> Option<DType> {
        match self.dtype? {
            CommDtype::Fp32 => None,
            CommDtype::Bf16 => Some(DType::Bf16),
            CommDtype::Fp16 => Some(DType::F16),
        }
    }
}

const REDUCE_BUCKET: &str = "zero_optimization.reduce_bucket_size";
const OVERLAP: &str = "zero_optimization.overlap_comm";
const DATA_TYPE: &str = "communication_data_type";

impl Raw {
    pub(super) fn all_reduce(
        &self,
        world: usize,
        precision: Precision,
        network: &Network,
        log: &mut Log,
    ) -> Result<AllReduce, ConfigError> {
        if world == 1 {
            // Nothing is communicated: keys of a file about it are accepted and change nothing.
            log.typed("bucket-size", self.bucket_size);
            log.typed("comm-dtype", self.comm_dtype);
        }
        let file = self.deepspeed.as_ref().filter(|_| world > 1);
        let log = if world > 1 { log } else { &mut Log::default() };
        Ok(AllReduce {
            bucket: self.bucket(file, network, world, log)?,
            overlap: self.overlap(file, log),
            dtype: self.comm_dtype(file, precision, log)?,
            predivide: predivide(file, world),
        })
    }

    fn bucket(
        &self,
        file: Option<&DeepSpeed>,
        network: &Network,
        world: usize,
        log: &mut Log,
    ) -> Result<usize, ConfigError> {
        let of_file = file.and_then(|file| file.whole(REDUCE_BUCKET));
        if let (None, Some(Setting::Given(elements))) = (self.bucket_size, of_file) {
            log.note("bucket-size", elements, Origin::File(REDUCE_BUCKET.to_string()));
            return at_least_one("bucket-size", usize::try_from(elements).unwrap_or(usize::MAX));
        }
        // Counting parameters takes the building of a model, which one rank needn't wait for.
        let default = match self.bucket_size {
            None if world > 1 => BUCKET.min(gradients(network).div_ceil(BUCKETS)),
            _ => BUCKET,
        };
        at_least_one("bucket-size", log.pick("bucket-size", self.bucket_size, default))
    }

    fn overlap(&self, file: Option<&DeepSpeed>, log: &mut Log) -> bool {
        let of_file = file.and_then(|file| file.boolean(OVERLAP));
        let (overlap, origin) = match (self.no_overlap, of_file) {
            (true, _) => (false, Origin::Flag),
            (false, Some(Setting::Given(overlap))) => (overlap, Origin::File(OVERLAP.to_string())),
            (false, _) => (true, Origin::default_value()),
        };
        if !overlap {
            log.note("no-overlap", "yes", origin);
        }
        overlap
    }

    fn comm_dtype(
        &self,
        file: Option<&DeepSpeed>,
        precision: Precision,
        log: &mut Log,
    ) -> Result<Option<CommDtype>, ConfigError> {
        let of_file = file.and_then(|file| match file.text(DATA_TYPE)? {
            "bfp16" => Some(CommDtype::Bf16),
            name => name.parse().ok(),
        });
        let (dtype, origin) = match (self.comm_dtype, of_file) {
            (Some(dtype), _) => (Some(dtype), Origin::Flag),
            (None, Some(dtype)) => (Some(dtype), Origin::File(DATA_TYPE.to_string())),
            (None, None) => (None, Origin::default_value()),
        };
        if precision == Precision::Fp64 && dtype == Some(CommDtype::Fp32) {
            let why = "gradients of an fp64 run are all-reduced in fp64, bf16 or fp16";
            return Err(ConfigError::setting("comm-dtype", CommDtype::Fp32, why));
        }
        match dtype {
            Some(dtype) => log.note("comm-dtype", dtype, origin),
            // Parameters and gradients are fp32, whatever matmuls are computed in.
            None if precision == Precision::Fp64 => log.note("comm-dtype", precision, origin),
            None => log.note("comm-dtype", Precision::Fp32, origin),
        }
        Ok(dtype)
    }
}

fn gradients(network: &Network) -> usize {
    network.expected().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
}

/// Divisor of a rank's mean before the all-reduce. DeepSpeed divides by `gradient_predivide_factor`, sums, and makes up
/// for the rest; with `prescale_gradients` it divides by the number of ranks and sums, which is what we do without its
/// file.
fn predivide(file: Option<&DeepSpeed>, world: usize) -> f64 {
    let Some(file) = file else { return world as f64 };
    let prescales = file.boolean("prescale_gradients") == Some(Setting::Given(true));
    match file.number("gradient_predivide_factor") {
        _ if prescales => world as f64,
        Some(Setting::Given(factor)) => factor,
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Explanation, Facts, Resolved};
    use super::*;
    use crate::deepspeed::Verdict;

    fn resolve(raw: Raw, world: usize) -> Result<Resolved, String> {
        let facts = Facts::synthetic(&raw).map_err(|e| e.to_string())?;
        raw.resolve(&facts, world).map_err(|e| e.to_string())
    }

    fn file(name: &str, text: &str) -> Raw {
        Raw { deepspeed: Some(DeepSpeed::parse(name, text).unwrap()), ..Raw::default() }
    }

    fn all_reduce(run: &Resolved) -> (usize, bool, Option<CommDtype>) {
        (run.all_reduce.bucket, run.all_reduce.overlap, run.all_reduce.dtype)
    }

    /// A third of the 459,562 parameters of the default model.
    const THIRD: usize = 153_188;

    #[test]
    fn flags_say_how_gradients_are_all_reduced() {
        let run = resolve(Raw { batch_size: Some(8), accumulate: Some(3), ..Raw::default() }, 4).unwrap();
        assert_eq!(all_reduce(&run), (THIRD, true, None));
        assert_eq!((run.nominal(), run.global_batch()), (96.0, 96));
        let plan = run.communication();
        assert_eq!((plan.bucket, plan.overlap, plan.dtype), (THIRD, true, None));
        assert_eq!(run.mesh(), graph::Mesh::of_data(4));

        let large = resolve(Raw { model: Some("vit-ti/4".into()), ..Raw::default() }, 4).unwrap();
        assert_eq!(large.all_reduce.bucket, 1 << 20);

        let typed = Raw {
            bucket_size: Some(500),
            no_overlap: true,
            comm_dtype: Some(CommDtype::Bf16),
            ..Raw::default()
        };
        let run = resolve(typed.clone(), 2).unwrap();
        assert_eq!(all_reduce(&run), (500, false, Some(CommDtype::Bf16)));
        assert_eq!(run.communication().dtype, Some(graph::DType::Bf16));
        assert_eq!(resolve(typed.clone(), 1).unwrap().mesh(), graph::Mesh::default());

        let refused = |raw: Raw| resolve(raw, 2).unwrap_err();
        let none = refused(Raw { bucket_size: Some(0), ..Raw::default() });
        assert_eq!(none, "--bucket-size 0: must be at least 1");
        let narrow =
            Raw { precision: Some(Precision::Fp64), comm_dtype: Some(CommDtype::Fp32), ..Raw::default() };
        let why = "--comm-dtype fp32: gradients of an fp64 run are all-reduced in fp64, bf16 or fp16";
        assert_eq!(refused(narrow), why);
        assert_eq!(Raw::default().or(typed.clone()).bucket_size, Some(500));
        assert!(Raw::default().or(typed).no_overlap);
    }

    /// The mean over all ranks is the same wherever it is divided; `clip` makes up for the rest.
    #[test]
    fn a_file_says_where_gradients_are_divided() {
        let with = |keys: &str| {
            let text = format!("{{\"train_micro_batch_size_per_gpu\": 8{keys}}}");
            resolve(file("ds.json", &text), 4).unwrap()
        };
        assert_eq!(with("").nominal(), 8.0, "as DeepSpeed does: the mean of a rank, divided afterwards");
        assert_eq!(with(", \"gradient_predivide_factor\": 2").nominal(), 16.0);
        assert_eq!(with(", \"prescale_gradients\": true").nominal(), 32.0);
        assert_eq!(with(", \"prescale_gradients\": true, \"gradient_predivide_factor\": 2").nominal(), 32.0);
        let alone = resolve(file("ds.json", "{\"gradient_predivide_factor\": 2}"), 1).unwrap();
        assert_eq!(alone.nominal(), 64.0, "one rank divides by what it has");

        let shaped = with(", \"zero_optimization\": {\"reduce_bucket_size\": 2e8, \"overlap_comm\": false}");
        assert_eq!(all_reduce(&shaped), (200_000_000, false, None));
        let half = ", \"communication_data_type\": \"bfp16\"";
        assert_eq!(with(half).all_reduce.dtype, Some(CommDtype::Bf16));
        let text = format!("{{\"train_micro_batch_size_per_gpu\": 8{half}}}");
        let raw = Raw { comm_dtype: Some(CommDtype::Fp32), bucket_size: Some(9), ..file("ds.json", &text) };
        let run = resolve(raw, 4).unwrap();
        assert_eq!(all_reduce(&run), (9, true, Some(CommDtype::Fp32)));
        assert_eq!(run.communication().dtype, None);
    }

    #[test]
    fn communication_may_change_when_a_run_continues_but_not_between_ranks() {
        let one = resolve(Raw::default(), 2).unwrap();
        let other =
            resolve(Raw { bucket_size: Some(7), comm_dtype: Some(CommDtype::Fp16), ..Raw::default() }, 2)
                .unwrap();
        assert_eq!(other.differences(&one), Vec::<String>::new());
        let among = other.differences_among_ranks(&one);
        assert_eq!(among, ["all_reduce.bucket is 7, not 153188", "all_reduce.dtype is fp16, not nothing"]);
    }

    #[test]
    fn what_is_explained_of_communication_is_what_happens() {
        let text =
            r#"{"communication_data_type": "bf16", "zero_optimization": {"reduce_bucket_size": "auto"}}"#;
        let explained = |raw: Raw, world| {
            let facts = Facts::synthetic(&raw).unwrap();
            raw.explain(&facts, world)
        };
        let setting = |explained: &Explanation, name: &str| {
            explained.settings.iter().find(|n| n.name == name).map(|n| (n.value.clone(), n.origin.clone()))
        };
        let four = explained(file("ds.json", text), 4);
        let from_file = Origin::File("communication_data_type".to_string());
        assert_eq!(setting(&four, "comm-dtype"), Some(("bf16".to_string(), from_file)));
        assert_eq!(setting(&four, "bucket-size"), Some(("153188".to_string(), Origin::default_value())));
        assert_eq!(four.keys[1].verdict, Verdict::Honoured("--bucket-size 153188".to_string()));
        let one = explained(file("ds.json", text), 1);
        assert_eq!((setting(&one, "comm-dtype"), setting(&one, "bucket-size")), (None, None));
        let nothing = Verdict::Accepted("one rank communicates nothing".to_string());
        assert!(one.keys.iter().all(|row| row.verdict == nothing));
    }
}
