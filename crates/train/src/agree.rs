//! Before the first step all ranks compare what they are about to do.

use crate::error::TrainError;
use comm::Communicator;
use config::Resolved;
use config::sets::Sets;
use graph::Program;
use serde::{Deserialize, Serialize};

/// What must be the same on every rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Terms {
    version: String,
    config: Resolved,
    train: u64,
    test: u64,
    /// Of the states, and of the collectives in their order.
    program: u64,
}

/// Ends the run if a rank has another version, configuration, data set or model than rank 0; the error says which, and what
/// differs. All ranks come to the same result.
pub fn agree(world: &Communicator, run: &Resolved, sets: &Sets, program: &Program) -> Result<(), TrainError> {
    if world.size() == 1 {
        return Ok(());
    }
    let [train, test] = sets.fingerprints();
    let mine = Terms {
        version: env!("CARGO_PKG_VERSION").to_string(),
        config: run.clone(),
        train,
        test,
        program: program_hash(program),
    };
    let text = serde_json::to_vec(&mine).map_err(|e| TrainError::Disagree(e.to_string()))?;
    let texts = world.gather_bytes(world.name("comparing configurations"), &text)?;
    let read = |text: &Vec<u8>| serde_json::from_slice::<Terms>(text).ok();
    let Some(first) = texts.first().and_then(read) else {
        return Err(TrainError::Disagree("rank 0 is of another version of vitesse".to_string()));
    };
    for (rank, text) in texts.iter().enumerate().skip(1) {
        let difference = match read(text) {
            None => Some("is of another version of vitesse".to_string()),
            Some(theirs) => difference(&first, &theirs),
        };
        if let Some(difference) = difference {
            return Err(TrainError::Disagree(format!("rank {rank} {difference}")));
        }
    }
    Ok(())
}

/// How a rank's terms differ from those of rank 0.
fn difference(first: &Terms, theirs: &Terms) -> Option<String> {
    if first.version != theirs.version {
        return Some(format!("runs vitesse {}, rank 0 {}", theirs.version, first.version));
    }
    let settings = theirs.config.differences_among_ranks(&first.config);
    if !settings.is_empty() {
        return Some(format!("has another configuration than rank 0: {}", settings.join("; ")));
    }
    let set = |which, theirs: u64, first: u64| {
        let text = format!(
            "has other {which} data than rank 0, of the same size: fingerprint {theirs:016x}, not {first:016x}"
        );
        (theirs != first).then_some(text)
    };
    set("training", theirs.train, first.train).or_else(|| set("test", theirs.test, first.test)).or_else(
        || {
            let text = "has compiled another program than rank 0 from the same configuration";
            (theirs.program != first.program).then(|| text.to_string())
        },
    )
}

/// Of what ranks must have in common: names and shapes of states, and the collectives of every plan.
fn program_hash(program: &Program) -> u64 {
    let fnv = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let mut text = String::new();
    for state in &program.states {
        text.push_str(&format!("{} {}\n", state.name, state.ty));
    }
    for plan in program.plans() {
        for (step, group) in plan.collectives() {
            text.push_str(&format!("{} {} {group} {}\n", plan.name, step.op.name(), step.layer));
        }
    }
    text.bytes().fold(0xcbf2_9ce4_8422_2325, fnv)
}
