//! The memory of a rank, by what it is for.

use crate::table::count;
use graph::{Memory, Program, State, Use};
use serde_json::{Map, Value};

/// Trained and frozen parameters, each once over all ranks.
fn parameters(program: &Program) -> usize {
    let parameters = program.states.iter().filter(|state| State::is_parameter(state));
    parameters.map(|state| state.ty.shape.count()).sum()
}

/// What a rank has memory for.
fn used(memories: &[Memory]) -> impl Iterator<Item = Use> {
    Use::ALL.into_iter().filter(|what| memories.iter().any(|memory| memory.of(*what) > 0))
}

/// Bytes for each purpose, and for each parameter of the model.
pub fn print(program: &Program) {
    let (memory, parameters) = (program.memory(), parameters(program));
    let line = |name: &str, bytes: usize| {
        println!("{name:<22} {:>16} {:>13.2}", count(bytes), bytes as f64 / parameters as f64);
    };
    println!("{:<22} {:>16} {:>13}", "memory of a rank", "bytes", "per parameter");
    used(&[memory]).for_each(|what| line(what.name(), memory.of(what)));
    line("all", memory.total());
}

/// The bytes of two programs, and how they differ; `names` are the heads of their columns.
pub fn print_both(names: [&str; 2], programs: [&Program; 2]) {
    let memories = programs.map(Program::memory);
    let widths = names.map(|name| name.chars().count().max(16));
    let line = |name: &str, [before, after]: [usize; 2]| {
        let change = after as i128 - before as i128;
        let sign = ["", "-", "+"][usize::from(change != 0) + usize::from(change > 0)];
        let change = format!("{sign}{}", count(change.unsigned_abs() as usize));
        let [one, other] = widths;
        println!("{name:<22} {:>one$} {:>other$} {change:>16}", count(before), count(after));
    };
    let [one, other] = widths;
    println!("{:<22} {:>one$} {:>other$} {:>16}", "memory of a rank", names[0], names[1], "change");
    used(&memories).for_each(|what| line(what.name(), memories.map(|memory| memory.of(what))));
    line("all", memories.map(|memory| memory.total()));
}

/// Bytes by their purpose, under the names of the table.
pub fn json(program: &Program) -> Value {
    let memory = program.memory();
    let key = |what: Use| what.name().replace([' ', '-'], "_");
    Value::Object(Use::ALL.iter().map(|what| (key(*what), memory.of(*what).into())).collect::<Map<_, _>>())
}
