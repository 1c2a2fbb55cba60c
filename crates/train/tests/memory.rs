//! Memory is planned: what is predicted is allocated, and recompute pays off.

mod common;

use common::{HEADER, Setup, fill_batch};
use cpu::Which;
use graph::{Header, Recompute, Role};
use models::vit::Vit;

#[test]
fn the_arena_is_as_large_as_predicted() {
    let cases = [("vit-nano/4", Recompute::None), ("vit-ti/8", Recompute::Full)];
    for ((name, recompute), accumulates) in cases.into_iter().flat_map(|case| [(case, false), (case, true)]) {
        let vit = Vit::named(name, 32, 3, 10).unwrap();
        let executor = Setup { recompute, accumulates, ..Setup::new(4) }.executor::<f32>(&vit);
        let program = executor.program();
        assert_eq!(executor.allocated().0, program.arena(), "{name}");
        assert_eq!(program.arena(), program.plans().map(|p| p.arena).into_iter().max().unwrap());
        assert_eq!(executor.allocated().1, program.state_bytes(), "{name}");
    }
}

/// Of activations alone, without the gradients that may lie there too.
#[test]
fn full_recompute_halves_the_arena() {
    let arena = |name, image, recompute| {
        let vit = Vit::named(name, image, 3, 10).unwrap();
        let program = Setup { recompute, accumulates: true, ..Setup::new(4) }.program(&vit);
        program.arena() as f64
    };
    for (name, image) in [("vit-ti/4", 32), ("vit-b/16", 224)] {
        let ratio = arena(name, image, Recompute::Full) / arena(name, image, Recompute::None);
        println!("{name}: full recompute needs {:.1}% of the arena", 100.0 * ratio);
        assert!(ratio <= 0.5, "{name}: {ratio}");
    }
}

#[test]
fn recompute_gives_the_same_bits() {
    let vit = Vit {
        dropout: 0.1,
        attention_dropout: 0.1,
        drop_path: 0.2,
        ..Vit::named("vit-nano/4", 32, 3, 10).unwrap()
    };
    let gradients = |recompute| {
        let mut executor = Setup { recompute, ..Setup::new(4) }.executor::<f32>(&vit);
        common::fill_weights(&mut executor);
        fill_batch(&mut executor, Which::Last, 0, 10);
        executor.run(Which::Last, &Header { nominal: 4.0, ..HEADER }).unwrap();
        let names = executor.program().states.iter().filter(|s| s.role == Role::Gradient);
        names.map(|s| common::state(&executor, &s.name)).collect::<Vec<_>>()
    };
    assert_eq!(gradients(Recompute::None), gradients(Recompute::Full));
}
