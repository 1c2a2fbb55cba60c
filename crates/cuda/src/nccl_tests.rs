//! Every call of NCCL in a group of one rank, captured as a graph and launched again. Skipped without NCCL.

use crate::driver::{Block, Context, Stream};
use comm::nccl::{DeviceQueue, Library, join};
use comm::{Call, Collective, Communicator, Counts, ElementType, Engine, Reduction, Span};
use std::ffi::c_void;
use std::sync::Arc;

const LEN: usize = 1000;
const BYTES: usize = 4 * LEN;

fn collectives() -> Vec<Collective> {
    let counts = Counts { send: vec![LEN], receive: vec![LEN] };
    vec![
        Collective::AllReduce(Reduction::Sum),
        Collective::AllReduce(Reduction::Mean),
        Collective::AllReduce(Reduction::Max),
        Collective::ReduceScatter(Reduction::Sum),
        Collective::ReduceScatter(Reduction::Mean),
        Collective::ReduceScatter(Reduction::Max),
        Collective::AllGather,
        Collective::AllToAll(None),
        Collective::AllToAll(Some(Arc::new(counts))),
        // In place: what is there stays.
        Collective::Broadcast { root: 0 },
        Collective::Barrier,
    ]
}

#[test]
#[ignore = "needs a GPU"]
fn every_call_of_nccl_is_captured() {
    let library = testing::need!(Library::find());
    let context = Context::open(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let (scratch, from) = (Block::new(&context, 256, "a test"), Block::new(&context, BYTES, "a test"));
    let (scratch, from) = (scratch.unwrap(), from.unwrap());
    let collectives = collectives();
    let into = Block::new(&context, BYTES * collectives.len(), "a test").unwrap();
    let queue = DeviceQueue { stream: stream.raw.cast(), scratch: scratch.address as *mut c_void };
    let world = Communicator::solo();
    // SAFETY: the stream and the scratch are of the GPU that is current, and are dropped after the group.
    let engine: Arc<dyn Engine> = unsafe { join(Ok(library), &world, queue) }.unwrap();
    let comm = world.with_engine(Arc::clone(&engine));
    let name = comm.name("a test");
    let span = |address: u64| Span { address: address as *mut u8, len: LEN };
    let place = |number: usize| into.address + (number * BYTES) as u64;
    let play = || {
        for (number, collective) in collectives.iter().enumerate() {
            let receive = span(place(number));
            let (send, receive) = match collective {
                Collective::Barrier => (Span::EMPTY, Span::EMPTY),
                Collective::Broadcast { .. } => (receive, receive),
                _ => (span(from.address), receive),
            };
            let call = Call { collective: collective.clone(), kind: ElementType::F32, send, receive, name };
            // SAFETY: memory of the GPU that is there until the end of the test.
            let ticket = unsafe { comm.start(call) }?;
            comm.wait(ticket)?;
        }
        Ok(())
    };
    // NCCL connects at the first call.
    play().unwrap();
    stream.synchronise(|| "a test".into()).unwrap();
    let graph = stream.capture(play, "a test").unwrap();
    let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    for round in 0..3 {
        let values: Vec<f32> = (0..LEN).map(|i| (i * (round + 1)) as f32 - 7.5).collect();
        stream.send_now(&bytes(&values), from.address).unwrap();
        stream.zero(into.address, BYTES * collectives.len()).unwrap();
        stream.launch(&graph, "a test").unwrap();
        for (number, collective) in collectives.iter().enumerate() {
            let mut got = vec![0; BYTES];
            stream.fetch_now(place(number), &mut got).unwrap();
            let stays = matches!(collective, Collective::Broadcast { .. } | Collective::Barrier);
            let expected = if stays { vec![0; BYTES] } else { bytes(&values) };
            assert!(got == expected, "round {round}: {collective:?}");
        }
        assert_eq!(engine.check(), Ok(()));
    }
    // Graphs go before the group does.
    drop(graph);
    drop((comm, engine));
}
