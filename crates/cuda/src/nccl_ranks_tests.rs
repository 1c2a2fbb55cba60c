//! Every call of NCCL in every type, among processes that share a GPU and in groups of them, captured as one graph and launched again.
//!
//! The test starts its own program once for each rank. To NCCL, each is on a host of its own.

use crate::driver::{Block, Context, Stream};
use comm::nccl::{DeviceQueue, Library, join};
use comm::{Call, Collective, Communicator, Counts, ElementType, Engine, Member, Reduction, Span, Start};
use half::{bf16, f16};
use std::ffi::c_void;
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

/// Elements of a rank's part.
const PART: usize = 257;
const KINDS: [ElementType; 8] = [
    ElementType::F32,
    ElementType::F64,
    ElementType::Bf16,
    ElementType::F16,
    ElementType::U8,
    ElementType::I32,
    ElementType::I64,
    ElementType::U64,
];
/// Tells a process that it is a rank of the test.
const IS_RANK: &str = "VITESSE_TEST_IS_RANK";

/// What a rank has: small whole numbers that the mean of up to four ranks keeps whole.
fn data(rank: usize, len: usize) -> Vec<i64> {
    (0..len).map(|i| ((i * 7 + rank * 5 + 3) % 5 * 12) as i64).collect()
}

fn encoded(kind: ElementType, values: &[i64]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|x| match kind {
            ElementType::F32 => (*x as f32).to_le_bytes().to_vec(),
            ElementType::F64 => (*x as f64).to_le_bytes().to_vec(),
            ElementType::Bf16 => bf16::from_f64(*x as f64).to_le_bytes().to_vec(),
            ElementType::F16 => f16::from_f64(*x as f64).to_le_bytes().to_vec(),
            ElementType::U8 => vec![*x as u8],
            ElementType::I32 => (*x as i32).to_le_bytes().to_vec(),
            ElementType::I64 | ElementType::U64 => x.to_le_bytes().to_vec(),
        })
        .collect()
}

fn decoded(kind: ElementType, bytes: &[u8]) -> Vec<f64> {
    let number = |bytes: &[u8]| match *bytes {
        [a] => f64::from(a),
        [a, b] if kind == ElementType::Bf16 => bf16::from_le_bytes([a, b]).to_f64(),
        [a, b] => f16::from_le_bytes([a, b]).to_f64(),
        [a, b, c, d] if kind == ElementType::F32 => f64::from(f32::from_le_bytes([a, b, c, d])),
        [a, b, c, d] => f64::from(i32::from_le_bytes([a, b, c, d])),
        [a, b, c, d, e, f, g, h] if kind == ElementType::F64 => f64::from_le_bytes([a, b, c, d, e, f, g, h]),
        [a, b, c, d, e, f, g, h] => i64::from_le_bytes([a, b, c, d, e, f, g, h]) as f64,
        _ => panic!("{} bytes", bytes.len()),
    };
    bytes.chunks_exact(kind.bytes()).map(number).collect()
}

/// Elements that `from` sends to `to` where parts are unequal.
fn unequal(from: usize, to: usize) -> usize {
    3 * (from + 2 * to)
}

/// NCCL has no mean of integers.
fn collectives(kind: ElementType, rank: usize, size: usize) -> Vec<Collective> {
    let counts = Counts {
        send: (0..size).map(|to| unequal(rank, to)).collect(),
        receive: (0..size).map(|from| unequal(from, rank)).collect(),
    };
    let is_float = matches!(kind, ElementType::F32 | ElementType::F64 | ElementType::Bf16 | ElementType::F16);
    let reductions = [Reduction::Sum, Reduction::Max].into_iter().chain(is_float.then_some(Reduction::Mean));
    let mut all: Vec<Collective> = reductions.clone().map(Collective::AllReduce).collect();
    all.extend(reductions.map(Collective::ReduceScatter));
    all.extend([
        Collective::AllGather,
        Collective::AllToAll(None),
        Collective::AllToAll(Some(Arc::new(counts))),
    ]);
    all.extend([Collective::Broadcast { root: size - 1 }, Collective::Barrier]);
    all
}

/// Elements that a rank sends and receives.
fn lengths(collective: &Collective, size: usize) -> (usize, usize) {
    match collective {
        Collective::AllReduce(_) => (PART, PART),
        Collective::ReduceScatter(_) => (PART * size, PART),
        Collective::AllGather => (PART, PART * size),
        Collective::AllToAll(None) => (PART * size, PART * size),
        Collective::AllToAll(Some(counts)) => (counts.send.iter().sum(), counts.receive.iter().sum()),
        Collective::Broadcast { .. } => (0, PART),
        Collective::Barrier => (0, 0),
    }
}

/// What the rank `me` of a group of these ranks of the world receives.
fn expected(collective: &Collective, me: usize, group: &[usize]) -> Vec<f64> {
    let size = group.len();
    let reduced = |reduction: Reduction, i: usize, len: usize| {
        let values = group.iter().map(|rank| data(*rank, len)[i] as f64);
        match reduction {
            Reduction::Sum => values.sum(),
            Reduction::Mean => values.sum::<f64>() / size as f64,
            Reduction::Max => values.fold(f64::MIN, f64::max),
        }
    };
    let floats = |values: &[i64]| values.iter().map(|x| *x as f64).collect::<Vec<_>>();
    match collective {
        Collective::AllReduce(reduction) => (0..PART).map(|i| reduced(*reduction, i, PART)).collect(),
        Collective::ReduceScatter(reduction) => {
            (0..PART).map(|i| reduced(*reduction, me * PART + i, PART * size)).collect()
        }
        Collective::AllGather => group.iter().flat_map(|rank| floats(&data(*rank, PART))).collect(),
        Collective::AllToAll(None) => {
            group.iter().flat_map(|rank| floats(&data(*rank, PART * size)[me * PART..][..PART])).collect()
        }
        Collective::AllToAll(Some(_)) => {
            let sent = |(from, rank): (usize, &usize)| {
                let before: usize = (0..me).map(|to| unequal(from, to)).sum();
                let all: usize = (0..size).map(|to| unequal(from, to)).sum();
                floats(&data(*rank, all)[before..][..unequal(from, me)])
            };
            group.iter().enumerate().flat_map(sent).collect()
        }
        Collective::Broadcast { root } => floats(&data(group[*root], PART)),
        Collective::Barrier => vec![],
    }
}

/// A call, the group it is in, and where its data are: offsets in the memory of the test.
struct Planned {
    group: usize,
    kind: ElementType,
    collective: Collective,
    send: (usize, usize),
    receive: (usize, usize),
}

/// Every collective of every type over every group of a rank, each with memory of its own, and the bytes they take together.
fn planned(groups: &[(Communicator, Vec<usize>)], rank: usize) -> Result<(Vec<Planned>, usize), String> {
    let mut calls = vec![];
    let mut bytes = 0;
    for (group, (_, ranks)) in groups.iter().enumerate() {
        let me = ranks.iter().position(|other| *other == rank).ok_or("a rank is in its groups")?;
        for kind in KINDS {
            for collective in collectives(kind, me, ranks.len()) {
                let (send, receive) = lengths(&collective, ranks.len());
                let mut place = |len: usize| {
                    let at = bytes;
                    bytes += (len * kind.bytes()).next_multiple_of(256);
                    (at, len)
                };
                calls.push(Planned { group, kind, collective, send: place(send), receive: place(receive) });
            }
        }
    }
    Ok((calls, bytes))
}

/// Whether what arrived is what was wanted. Half precision has 8 and 11 bits: sums of these numbers fit, and means are sums divided.
fn agree(kind: ElementType, got: &[f64], wanted: &[f64]) -> bool {
    let within = if matches!(kind, ElementType::Bf16 | ElementType::F16) { 1e-2 } else { 1e-6 };
    got.len() == wanted.len() && got.iter().zip(wanted).all(|(a, b)| (a - b).abs() <= b.abs() * within)
}

fn try_every_call(member: &Member) -> Result<(), String> {
    let told = |error: &dyn std::fmt::Display| error.to_string();
    let (rank, size) = (member.place.rank, member.place.world);
    let library = Library::find().map_err(|e| told(&e))?;
    let context = Context::open(0).map_err(|e| told(&e))?;
    let stream = Stream::new(&context).map_err(|e| told(&e))?;
    let scratch = Block::new(&context, 512, "a test").map_err(|e| told(&e))?;
    let queue = DeviceQueue { stream: stream.raw.cast(), scratch: scratch.address as *mut c_void };
    // SAFETY: the stream and the scratch are of the GPU that is current, and are dropped after the group.
    let engine: Arc<dyn Engine> = unsafe { join(Ok(library), &member.world, queue) }.map_err(|e| told(&e))?;
    let world = member.world.with_engine(Arc::clone(&engine));
    // All ranks, neighbours, and every other one.
    let of = |belongs: &dyn Fn(usize) -> usize| -> (usize, Vec<usize>) {
        (belongs(rank), (0..size).filter(|other| belongs(*other) == belongs(rank)).collect())
    };
    let mut groups: Vec<(Communicator, Vec<usize>)> = vec![(world.clone(), (0..size).collect())];
    for (colour, ranks) in [of(&|rank| rank / 2), of(&|rank| rank % 2)] {
        groups.push((world.split_sharing_queue(colour, rank).map_err(|e| told(&e))?, ranks));
    }
    let (calls, bytes) = planned(&groups, rank)?;
    let memory = Block::new(&context, bytes, "a test").map_err(|e| told(&e))?;
    let span = |(offset, len): (usize, usize)| match len {
        0 => Span::EMPTY,
        _ => Span { address: (memory.address as usize + offset) as *mut u8, len },
    };
    let play = || {
        for Planned { group, kind, collective, send, receive } in &calls {
            let comm = &groups[*group].0;
            let (send, receive) = (span(*send), span(*receive));
            let send = if matches!(collective, Collective::Broadcast { .. }) { receive } else { send };
            let call = Call {
                collective: collective.clone(),
                kind: *kind,
                send,
                receive,
                name: comm.name("a test"),
            };
            // SAFETY: memory of the GPU that is there until the end of the test.
            let ticket = unsafe { comm.start(call) }?;
            comm.wait(ticket)?;
        }
        Ok(())
    };
    let mut content = vec![0; bytes];
    for Planned { kind, collective, send, receive, .. } in &calls {
        let (offset, len) = if matches!(collective, Collective::Broadcast { .. }) { *receive } else { *send };
        let values = encoded(*kind, &data(rank, len));
        content[offset..][..values.len()].copy_from_slice(&values);
    }
    // NCCL connects at the first call.
    play().map_err(|e: crate::error::CudaError| told(&e))?;
    stream.synchronise(|| "a test".into()).map_err(|e| told(&e))?;
    let graph = stream.capture(play, "a test").map_err(|e| told(&e))?;
    for round in 0..2 {
        stream.send_now(&content, memory.address).map_err(|e| told(&e))?;
        stream.launch(&graph, "a test").map_err(|e| told(&e))?;
        let mut got = vec![0; bytes];
        stream.fetch_now(memory.address, &mut got).map_err(|e| told(&e))?;
        for Planned { group, kind, collective, receive, .. } in &calls {
            let ranks = &groups[*group].1;
            let me = ranks.iter().position(|other| *other == rank).ok_or("a rank is in its groups")?;
            let values = decoded(*kind, &got[receive.0..][..receive.1 * kind.bytes()]);
            if !agree(*kind, &values, &expected(collective, me, ranks)) {
                return Err(format!("round {round}, group {ranks:?}: {collective:?} of {}", kind.name()));
            }
        }
        engine.check().map_err(|e| told(&e))?;
    }
    println!("{} calls in {} groups", calls.len(), groups.len());
    member.world.barrier(member.world.name("the end of a test")).map_err(|e| told(&e))?;
    // Graphs go before the groups do.
    drop(graph);
    drop((groups, world, engine));
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn a_rank_of_many() {
    if std::env::var(IS_RANK).is_err() {
        return testing::inapplicable("a rank of the test beside it, which starts it");
    }
    let options = comm::Options { comm: None, ranks: None, timeout: None };
    let started = comm::start(&options, |line| eprintln!("{line}"));
    let Ok(Start::Process(member)) = started else { panic!("no process among many") };
    member.run(try_every_call).unwrap_or_else(|report| panic!("{report:?}"));
}

#[test]
#[ignore = "needs a GPU"]
fn every_call_of_nccl_among_processes() {
    testing::need!(Library::find());
    for ranks in [2, 3, 4] {
        let began = Instant::now();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let start = |rank: usize| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["nccl_ranks_tests::a_rank_of_many", "--exact", "--ignored", "--nocapture"]);
            command
                .env(IS_RANK, "1")
                .env("NCCL_HOSTID", format!("host-{rank}"))
                .env("NCCL_SOCKET_IFNAME", "lo");
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
            command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", ranks.to_string());
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let children: Vec<_> = (0..ranks).map(start).collect();
        for (rank, child) in children.into_iter().enumerate() {
            let output = child.wait_with_output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout).into_owned()
                + &String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && text.contains("1 passed"), "rank {rank} of {ranks}: {text}");
            let line = text.lines().find(|line| line.contains(" calls in ")).unwrap_or_default();
            println!("rank {rank} of {ranks}: {line}");
        }
        println!("{ranks} ranks: every collective in every type, {:.1} s", began.elapsed().as_secs_f64());
    }
}
