use super::*;
use comm::{Collective, Reduction as Sums};

fn work(lane: Lane, waits: &[usize]) -> Placed {
    let action = Action::Zero { at: 0, bytes: 0 };
    Placed { waits: waits.to_vec(), ..Placed::new(action, lane, (0, 0)) }
}

fn compute(waits: &[usize]) -> Placed {
    work(Lane::Compute, waits)
}

fn collective_call(send: (Address, usize), receive: (Address, usize)) -> CollectiveCall {
    let (collective, layer) = (Collective::AllReduce(Sums::Sum), "layer".to_string());
    let group = graph::Mesh::of_data(2).world();
    CollectiveCall { group, collective, kind: ElementType::F32, send, receive, layer, times: None }
}

/// Collective in place, in the memory of a number.
fn call(waits: &[usize], memory: usize) -> Placed {
    let at = (4096 * memory as Address, 8);
    Placed { action: Action::Collective(collective_call(at, at)), ..work(Lane::Comm, waits) }
}

/// Three buckets of a backward pass, and what comes after.
fn backward() -> Vec<Placed> {
    vec![
        compute(&[]),
        call(&[0], 0),
        compute(&[]),
        compute(&[]),
        call(&[3], 1),
        compute(&[]),
        call(&[5], 2),
        compute(&[1]),
        compute(&[6]),
    ]
}

#[test]
fn all_is_launched_before_the_host_waits() {
    use Stage::*;
    let expected = [
        Stretch(vec![0]),
        Leave(1),
        Stretch(vec![2, 3]),
        Leave(4),
        Stretch(vec![5]),
        Leave(6),
        Return(1),
        Stretch(vec![7]),
        Return(6),
        Stretch(vec![8]),
    ];
    assert_eq!(stages(&backward()), expected);
    // Nobody waits: the list still ends with the results.
    assert_eq!(stages(&backward()[..7])[6..], [Return(6)]);
    // No collective: one stretch.
    assert_eq!(stages(&[compute(&[]), compute(&[])]), [Stretch(vec![0, 1])]);
    assert_eq!(stages(&[]), []);
}

#[test]
fn a_collective_takes_along_what_another_brings() {
    use Stage::*;
    let list = [call(&[], 0), call(&[], 1), call(&[], 0), call(&[], 2)];
    assert_eq!(stages(&list), [Leave(0), Leave(1), Return(0), Leave(2), Leave(3), Return(3)]);
}

/// A collective that may be left under way.
fn left(waits: &[usize], memory: usize) -> Placed {
    Placed { left: vec![StateId(memory as u32)], ..call(waits, memory) }
}

#[test]
fn what_a_list_leaves_is_launched_behind_it() {
    use Stage::*;
    let update = [compute(&[]), left(&[0], 0), compute(&[]), call(&[2], 1), left(&[2], 2), compute(&[3])];
    assert_eq!(stages_on_device(&update), [Stretch(vec![0, 2, 3, 5]), Behind(vec![1, 4])]);
    // One that is needed in the list stays.
    let needed = [compute(&[]), left(&[0], 0), left(&[0], 1), compute(&[2]), left(&[3], 2)];
    assert_eq!(stages_on_device(&needed), [Stretch(vec![0, 2, 3]), Behind(vec![1, 4])]);
    let twice = [left(&[], 0), call(&[], 0)];
    assert_eq!(stages_on_device(&twice), [Stretch(vec![0, 1])]);
    assert_eq!(stages_on_device(&backward()), [Stretch((0..9).collect())]);
    // Through the host nothing is left.
    let mut bound = Bound { actions: update.to_vec(), ..Bound::default() };
    all_done_at_the_end(&mut bound);
    assert!(bound.actions.iter().all(|placed| placed.left.is_empty()));
    assert_eq!(stages(&bound.actions).last(), Some(&Return(4)));
}

#[test]
fn waits_for_what_was_left_are_noted() {
    let late = Placed { after: vec![StateId(0)], ..compute(&[]) };
    let bound = Bound { actions: vec![compute(&[]), late], ..Bound::default() };
    let (of_forward, marks) = timed(bound, 1000);
    assert_eq!(marks, TimeNotes { calls: 0, waits: 1 });
    let after: Vec<usize> = of_forward.actions.iter().map(|placed| placed.after.len()).collect();
    assert_eq!(after, [0, 0, 1, 0], "the note behind the wait has it");
    // What is left has no time in the list that leaves it.
    let bound = Bound { actions: vec![compute(&[]), left(&[0], 0)], ..Bound::default() };
    assert_eq!(timed(bound.clone(), 1000), (bound, TimeNotes::default()));
}

/// Runs stages, and records the order of the host's and the lanes' work.
#[derive(Default)]
struct Recorder {
    /// Launched, or on their way to the host.
    launched: Vec<usize>,
    /// Calls of the host, in order.
    collectives: Vec<usize>,
}

impl Recorder {
    fn play(actions: &[Placed]) -> Self {
        let mut played = Recorder::default();
        let is_call = |index: &usize| matches!(actions[*index].action, Action::Collective(_));
        for stage in stages(actions) {
            match stage {
                Stage::Stretch(which) => {
                    assert!(!which.is_empty());
                    for index in which {
                        for wait in &actions[index].waits {
                            let known = if is_call(wait) { &played.collectives } else { &played.launched };
                            assert!(known.contains(wait), "{index} starts before {wait}");
                        }
                        assert!(!is_call(&index));
                        played.launched.push(index);
                    }
                }
                Stage::Leave(index) => {
                    assert!(actions[index].waits.iter().all(|wait| played.launched.contains(wait)));
                    played.launched.push(index);
                }
                Stage::Behind(_) => panic!("the host's collectives are done when the list ends"),
                Stage::Return(until) => {
                    // All that have left up to this one, in order.
                    let left = played.launched.iter().copied().filter(|i| is_call(i) && *i <= until);
                    let new: Vec<usize> = left.filter(|i| !played.collectives.contains(i)).collect();
                    assert!(new.contains(&until), "{until} is brought back twice, or before it left");
                    played.collectives.extend(new);
                }
            }
        }
        played
    }
}

/// Lists of any shape: everything happens once, waits are kept, and collectives are done in the same order by every rank.
#[test]
fn whatever_waits_for_what_the_order_is_kept() {
    let mut state = 7u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize % below.max(1)
    };
    for _ in 0..300 {
        let count = random(20);
        let mut actions: Vec<Placed> = Vec::new();
        for index in 0..count {
            let of_comm = random(3) == 0;
            let waits: Vec<usize> = (0..index)
                .filter(|i| (actions[*i].lane == Lane::Comm) != of_comm)
                .filter(|_| random(4) == 0)
                .collect();
            actions.push(if of_comm { call(&waits, random(4)) } else { compute(&waits) });
        }
        let played = Recorder::play(&actions);
        assert_eq!(played.launched, (0..count).collect::<Vec<_>>());
        let calls: Vec<usize> = (0..count).filter(|i| actions[*i].lane == Lane::Comm).collect();
        assert_eq!(played.collectives, calls);
    }
}

#[test]
fn times_are_noted_around_collectives_and_waits() {
    let bound = Bound { actions: backward(), ..Bound::default() };
    let (timed, marks) = timed(bound, 1000);
    assert_eq!(marks, TimeNotes { calls: 3, waits: 3 });
    assert_eq!(marks.bytes(), 96);
    let noted = |placed: &Placed| match &placed.action {
        Action::Launch(launch) => match launch.args[..] {
            [Arg::Pointer(at)] => Some((at, placed.waits.clone())),
            _ => None,
        },
        Action::Collective(collective_call) => collective_call.times.map(|at| (at, placed.waits.clone())),
        _ => None,
    };
    let seen: Vec<Option<(Address, Vec<usize>)>> = timed.actions.iter().map(noted).collect();
    let note = |at: Address, waits: &[usize]| Some((at, waits.to_vec()));
    let expected = [
        None,
        note(1000, &[0]),
        None,
        None,
        note(1016, &[3]),
        None,
        note(1032, &[5]),
        note(1048, &[]),
        note(1056, &[1]),
        None,
        note(1064, &[]),
        note(1072, &[6]),
        None,
        note(1080, &[]),
        note(1088, &[6]),
    ];
    assert_eq!(seen, expected);
    assert!(timed.actions[9].waits.is_empty(), "the note before it has waited");
    assert!(timed.actions[7..].iter().all(|placed| placed.lane == Lane::Compute));
    // A stretch never waits for what the host does in the middle of it.
    Recorder::play(&timed.actions);
}

#[test]
fn nothing_is_noted_without_collectives() {
    let bound = Bound { actions: vec![compute(&[])], ..Bound::default() };
    assert_eq!(timed(bound.clone(), 1000), (bound, TimeNotes::default()));
}

#[test]
fn every_collective_has_its_place_on_the_host() {
    let in_place = collective_call((4096, 33), (4096, 33));
    let apart = CollectiveCall { kind: ElementType::Bf16, ..collective_call((0, 100), (8192, 50)) };
    let calls = [in_place, apart];
    let (places, bytes) = host_places(calls.iter());
    assert_eq!(places, [(0, 0), (256, 512)]);
    assert_eq!(bytes, 640);
    assert_eq!(host_places([].into_iter()), (vec![], 0));
}
