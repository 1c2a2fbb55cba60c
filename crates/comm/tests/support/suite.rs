//! What every engine must do, as one rank of any number does it: the same text runs on threads and in processes.

use super::plain::{Sample, bits, inputs, reduced};
use comm::{Call, Collective, Communicator, Counts, ElementType, Name, Reduction, Span};
use half::{bf16, f16};
use testing::Random;

const REDUCTIONS: [Reduction; 3] = [Reduction::Sum, Reduction::Mean, Reduction::Max];

/// All collectives over all kinds, with lengths by the seed. Returns the bits of all results, mixed.
pub fn everything(comm: &Communicator, seed: u64) -> u64 {
    let mut rng = Random::seeded(seed);
    let mut digest = 0u64;
    let mut note = |results: Vec<u64>| {
        digest = results.into_iter().fold(digest, |d, bits| (d ^ bits).wrapping_mul(0x100_0000_01b3));
    };
    for _ in 0..2 {
        note(all_kinds_of::<f32>(comm, &mut rng));
        note(all_kinds_of::<f64>(comm, &mut rng));
        note(all_kinds_of::<bf16>(comm, &mut rng));
        note(all_kinds_of::<f16>(comm, &mut rng));
        note(all_kinds_of::<u8>(comm, &mut rng));
        note(all_kinds_of::<i32>(comm, &mut rng));
        note(all_kinds_of::<i64>(comm, &mut rng));
        note(all_kinds_of::<u64>(comm, &mut rng));
    }
    digest
}

fn all_kinds_of<E: Sample>(comm: &Communicator, rng: &mut Random) -> Vec<u64> {
    let mut results = Vec::new();
    let whole = matches!(E::TYPE, ElementType::U8 | ElementType::I32 | ElementType::I64 | ElementType::U64);
    for reduction in REDUCTIONS {
        // Devices have no means of whole numbers.
        if whole && reduction == Reduction::Mean && comm.engine().enqueues() {
            continue;
        }
        results.extend(all_reduce::<E>(comm, rng, reduction));
        results.extend(reduce_scatter::<E>(comm, rng, reduction));
    }
    results.extend(all_gather::<E>(comm, rng));
    results.extend(all_to_all::<E>(comm, rng));
    results.extend(all_to_all_parts::<E>(comm, rng));
    results.extend(broadcast::<E>(comm, rng));
    comm.barrier(comm.name("between kinds")).unwrap();
    results
}

fn same<E: Sample>(what: &str, comm: &Communicator, got: &[E], expected: &[E]) -> Vec<u64> {
    let (got, expected) = (bits(got), bits(expected));
    let kind = E::TYPE.name();
    assert_eq!(got.len(), expected.len(), "{what} of {kind}");
    if let Some(at) = (0..got.len()).find(|&i| got[i] != expected[i]) {
        let (n, rank, len) = (comm.size(), comm.rank(), got.len());
        panic!(
            "{what} of {len} {kind} among {n}: rank {rank} has {:x} at {at}, not {:x}",
            got[at], expected[at]
        );
    }
    got
}

fn name(comm: &Communicator) -> Name {
    comm.name("suite")
}

/// A length: none, one, odd, around the limits that engines have, or anything.
fn length(rng: &mut Random) -> usize {
    const KNOWN: [usize; 14] = [0, 1, 2, 3, 63, 65, 255, 257, 1000, 2047, 2049, 4097, 8193, 20_011];
    match rng.below(3) {
        0 => rng.below(3000),
        _ => *rng.pick(&KNOWN),
    }
}

fn all_reduce<E: Sample>(comm: &Communicator, rng: &mut Random, reduction: Reduction) -> Vec<u64> {
    let len = length(rng);
    let all = inputs::<E>(rng.next(), comm.size(), |_| len);
    let mut data = all[comm.rank()].clone();
    comm.all_reduce(name(comm), reduction, &mut data).unwrap();
    let expected = reduced(&all, reduction);
    let results = same("all_reduce", comm, &data, &expected);
    // And not in place.
    let mut into = vec![E::default(); len];
    let mine = &all[comm.rank()];
    raw(comm, Collective::AllReduce(reduction), Span::of(mine), Span::of_mut(&mut into), E::TYPE);
    same("all_reduce into another place", comm, &into, &expected);
    results
}

/// A call as the executor makes it: started, and waited for.
fn raw(comm: &Communicator, collective: Collective, send: Span, receive: Span, kind: comm::ElementType) {
    let call = Call { collective, kind, send, receive, name: name(comm) };
    // SAFETY: the callers' buffers live on, and they do nothing before this returns.
    let ticket = unsafe { comm.start(call) }.unwrap();
    comm.wait(ticket).unwrap();
}

fn reduce_scatter<E: Sample>(comm: &Communicator, rng: &mut Random, reduction: Reduction) -> Vec<u64> {
    let part = length(rng) / 3;
    let all = inputs::<E>(rng.next(), comm.size(), |_| part * comm.size());
    let mut into = vec![E::default(); part];
    comm.reduce_scatter(name(comm), reduction, &all[comm.rank()], &mut into).unwrap();
    let expected = reduced(&all, reduction);
    same("reduce_scatter", comm, &into, &expected[part * comm.rank()..][..part]);
    bits(&expected)
}

fn all_gather<E: Sample>(comm: &Communicator, rng: &mut Random) -> Vec<u64> {
    let len = length(rng) / 2;
    let all = inputs::<E>(rng.next(), comm.size(), |_| len);
    let mut into = vec![E::default(); len * comm.size()];
    comm.all_gather(name(comm), &all[comm.rank()], &mut into).unwrap();
    same("all_gather", comm, &into, &all.concat())
}

fn all_to_all<E: Sample>(comm: &Communicator, rng: &mut Random) -> Vec<u64> {
    let part = length(rng) / 3;
    let all = inputs::<E>(rng.next(), comm.size(), |_| part * comm.size());
    let expected: Vec<E> = all.iter().flat_map(|from| from[part * comm.rank()..][..part].to_vec()).collect();
    let mut into = vec![E::default(); part * comm.size()];
    comm.all_to_all(name(comm), &all[comm.rank()], &mut into).unwrap();
    same("all_to_all", comm, &into, &expected);
    // Nor do they run all-to-all in place.
    if !comm.engine().enqueues() {
        let mut data = all[comm.rank()].clone();
        let span = Span::of_mut(&mut data);
        raw(comm, Collective::AllToAll(None), span, span, E::TYPE);
        same("all_to_all in place", comm, &data, &expected);
    }
    bits(&all.concat())
}

fn all_to_all_parts<E: Sample>(comm: &Communicator, rng: &mut Random) -> Vec<u64> {
    let (n, me) = (comm.size(), comm.rank());
    // counts[from][to]
    let counts: Vec<Vec<usize>> = (0..n).map(|_| (0..n).map(|_| length(rng) / 4).collect()).collect();
    let all = inputs::<E>(rng.next(), n, |rank| counts[rank].iter().sum());
    let parcel = |from: usize| {
        let start: usize = counts[from][..me].iter().sum();
        all[from][start..][..counts[from][me]].to_vec()
    };
    let expected: Vec<E> = (0..n).flat_map(parcel).collect();
    let receive: Vec<usize> = (0..n).map(|from| counts[from][me]).collect();
    let mut into = vec![E::default(); receive.iter().sum()];
    let mine = Counts { send: counts[me].clone(), receive };
    comm.all_to_all_parts(name(comm), mine, &all[me], &mut into).unwrap();
    same("all_to_all_parts", comm, &into, &expected);
    bits(&all.concat())
}

fn broadcast<E: Sample>(comm: &Communicator, rng: &mut Random) -> Vec<u64> {
    let (len, root) = (length(rng), rng.below(comm.size()));
    let all = inputs::<E>(rng.next(), comm.size(), |_| len);
    let mut data = all[comm.rank()].clone();
    comm.broadcast(name(comm), root, &mut data).unwrap();
    same("broadcast", comm, &data, &all[root])
}

/// Groups of any colour and key, groups of groups, and texts of any length.
pub fn splits(comm: &Communicator, seed: u64) {
    let mut rng = Random::seeded(seed);
    let (n, me) = (comm.size(), comm.rank());
    for _ in 0..4 {
        let colours: Vec<usize> = (0..n).map(|_| rng.below(3) * 1000).collect();
        let keys: Vec<usize> = (0..n).map(|_| rng.below(3)).collect();
        let mut members: Vec<usize> = (0..n).filter(|&r| colours[r] == colours[me]).collect();
        members.sort_by_key(|&r| (keys[r], r));
        let part = comm.split(colours[me], keys[me]).unwrap();
        assert_eq!(part.size(), members.len());
        assert_eq!(members[part.rank()], me);
        let mut got = vec![0u64; members.len()];
        part.all_gather(name(&part), &[me as u64], &mut got).unwrap();
        assert_eq!(got, members.iter().map(|&r| r as u64).collect::<Vec<_>>());
        let again = part.split(0, part.size() - part.rank()).unwrap();
        assert_eq!(again.rank(), part.size() - 1 - part.rank());
        everything_small(&again, rng.next(), 10);
    }
    let text = |rank: usize| vec![rank as u8; rank * 700 % 2900];
    let texts = comm.gather_bytes(name(comm), &text(me)).unwrap();
    assert_eq!(texts, (0..n).map(text).collect::<Vec<_>>());
    let told = comm.broadcast_bytes(name(comm), n - 1, text(me)).unwrap();
    assert_eq!(told, text(n - 1));
}

fn everything_small(comm: &Communicator, seed: u64, calls: usize) {
    let mut rng = Random::seeded(seed);
    for _ in 0..calls {
        match rng.below(4) {
            0 => all_reduce::<f32>(comm, &mut rng, Reduction::Mean),
            1 => broadcast::<i64>(comm, &mut rng),
            2 => all_gather::<bf16>(comm, &mut rng),
            _ => all_to_all::<u8>(comm, &mut rng),
        };
    }
}

/// Several threads of each rank, each in a group of its own, at once.
pub fn interleaved(comm: &Communicator, seed: u64) {
    let parts: Vec<Communicator> = (0..3).map(|_| comm.split(0, comm.rank()).unwrap()).collect();
    std::thread::scope(|scope| {
        for (i, part) in parts.iter().enumerate() {
            scope.spawn(move || everything_small(part, seed + i as u64, 60));
        }
        everything_small(comm, seed + 99, 60);
    });
}

/// Groups of rows and of columns that share a queue: calls of both, and of all, started in one order and waited for at the end.
pub fn in_order(comm: &Communicator, rows: usize) {
    let (me, columns) = (comm.rank(), comm.size() / rows);
    let row = comm.split_sharing_queue(me / columns, me).unwrap();
    let column = comm.split_sharing_queue(me % columns, me).unwrap();
    assert_eq!((row.size(), column.size()), (columns, rows));
    for round in 0..20u64 {
        let mut data = [[me as u64 + round; 64]; 3];
        let [all, ours, theirs] = &mut data;
        let mut parts = [(comm, all), (&row, ours), (&column, theirs)];
        parts.rotate_left((round % 3) as usize);
        let tickets: Vec<_> = parts
            .iter_mut()
            .map(|(group, data)| {
                let span = Span::of_mut(&mut data[..]);
                let (collective, name) = (Collective::AllReduce(Reduction::Sum), name(group));
                let call = Call { collective, kind: ElementType::U64, send: span, receive: span, name };
                // SAFETY: waited for below, before the data goes.
                (*group, unsafe { group.start(call) }.unwrap())
            })
            .collect();
        for (group, ticket) in tickets {
            group.wait(ticket).unwrap();
        }
        let sum = |ranks: &mut dyn Iterator<Item = usize>| ranks.map(|rank| rank as u64 + round).sum::<u64>();
        let (first, place) = (me / columns * columns, me % columns);
        assert_eq!(data[0], [sum(&mut (0..comm.size())); 64]);
        assert_eq!(data[1], [sum(&mut (first..first + columns)); 64]);
        assert_eq!(data[2], [sum(&mut (0..rows).map(|row| row * columns + place)); 64]);
    }
}

/// Calls that are done beside the caller, and calls that wait for those.
pub fn queued(comm: &Communicator, seed: u64) {
    let all = inputs::<f32>(seed, comm.size(), |_| 10_000);
    let sums = reduced(&all, Reduction::Sum);
    let mut data = all[comm.rank()].clone();
    let mut gathered = vec![0.0f32; 100 * comm.size()];
    let few = all[comm.rank()][..100].to_vec();
    comm.scope(|scope| {
        for bucket in data.chunks_mut(3000) {
            scope.all_reduce(name(comm), Reduction::Sum, bucket)?;
        }
        scope.all_gather(name(comm), &few, &mut gathered)
    })
    .unwrap();
    same("all_reduce in a scope", comm, &data, &sums);
    let expected: Vec<f32> = all.iter().flat_map(|input| input[..100].to_vec()).collect();
    same("all_gather in a scope", comm, &gathered, &expected);

    // Started calls and calls at once keep their order.
    let mut data = all[comm.rank()].clone();
    let mut next = [comm.rank() as u64];
    let span = Span::of_mut(&mut data);
    let collective = Collective::AllReduce(Reduction::Sum);
    let call = Call { collective, kind: comm::ElementType::F32, send: span, receive: span, name: name(comm) };
    // SAFETY: `data` is left alone until the call was waited for.
    let ticket = unsafe { comm.start(call) }.unwrap();
    comm.all_reduce(name(comm), Reduction::Max, &mut next).unwrap();
    assert!(comm.is_done(ticket));
    comm.wait(ticket).unwrap();
    assert_eq!(next, [comm.size() as u64 - 1]);
    same("all_reduce that was started", comm, &data, &sums);
}
