//! A plan with every kind of collective, over NCCL in a group of one and through the host among several.

use super::on_each;
use comm::Communicator;
use comm::nccl::{Library, VARIABLE};
use cuda::{Executor, GpuComm, Options, Which};
use graph::{Header, Plan, Program};

const LEN: usize = 1024;

/// Collectives that follow each other, that wait for kernels, that kernels wait for, in other types and in place.
fn plan(ranks: usize) -> Plan {
    let part = LEN / ranks;
    let text = format!(
        "plan last batch=1 height=1 width=1 mesh=data:{ranks} arena=65536
input x f32[1024] @0
0 comm sum f32[1024] @4096 = all_reduce(x) reduction=\"sum\" group=\"data:{ranks}\" ; communication sum
1 comm mean f32[1024] @8192 = all_reduce(x) reduction=\"mean\" group=\"data:{ranks}\" ; communication mean
2 comm max f32[1024] @12288 = all_reduce(x) reduction=\"max\" group=\"data:{ranks}\" ; communication max
3 comm part f32[{part}] @16384 = reduce_scatter(x) reduction=\"sum\" group=\"data:{ranks}\" ; communication part
4 comm whole f32[1024] @20480 = all_gather(part) group=\"data:{ranks}\" ; communication whole
5 compute half bf16[1024] @24576 = cast(x) to=\"bf16\" ; forward half
6 comm half.sum bf16[1024] @26624 = all_reduce(half) reduction=\"sum\" group=\"data:{ranks}\" wait=5 ; communication half
7 compute back f32[1024] @28672 = cast(half.sum) to=\"f32\" wait=6 ; forward back
8 compute a f32[1024] @32768 = add(sum, mean) ; forward a
9 compute b f32[1024] @36864 = add(max, whole) ; forward b
10 compute c f32[1024] @40960 = add(a, b) ; forward c
11 comm d f32[1024] @40960 = all_reduce(c) reduction=\"sum\" group=\"data:{ranks}\" wait=10 ; communication d
12 compute e f32[1024] @45056 = add(d, back) wait=11 ; forward e
output sum
output mean
output max
output part
output whole
output e
"
    );
    text.parse().unwrap()
}

fn program(ranks: usize) -> Program {
    Program { last: plan(ranks), ..Program::default() }
}

fn executor(ranks: usize, comm: Option<GpuComm>) -> Result<Executor, cuda::CudaError> {
    let options = Options { device: 0, seed: 1, deterministic: true, tf32: false, comm };
    Executor::new(program(ranks), options)
}

/// What a rank has, in round `round`: small whole numbers, exact in every type.
fn data(rank: usize, round: usize) -> Vec<f32> {
    (0..LEN).map(|i| ((i * 7 + rank * 5 + round * 3) % 11) as f32 - 5.0).collect()
}

/// Runs the plan in several ways, and looks at all it has made.
fn try_all(executor: &mut Executor, rank: usize, ranks: usize) {
    let header = Header { seed: 0, step: 0, first_sample: 0, learning_rate: 0.0, nominal: 1.0 };
    for round in 0..6 {
        executor.upload_f32(Which::Last, "x", &data(rank, round)).unwrap();
        match round {
            // First the graph is made, then launched again.
            0..3 => executor.run(Which::Last, &header).unwrap(),
            3 => executor.run_eagerly(Which::Last, &header).unwrap(),
            4 => assert_eq!(executor.run_checked(Which::Last, &header).unwrap(), None),
            _ => executor.run(Which::Last, &header).unwrap(),
        }
        let all: Vec<Vec<f32>> = (0..ranks).map(|rank| data(rank, round)).collect();
        let over = |f: fn(f32, f32) -> f32| -> Vec<f32> {
            (0..LEN).map(|i| all.iter().map(|data| data[i]).reduce(f).unwrap()).collect()
        };
        let (sum, max) = (over(|a, b| a + b), over(f32::max));
        let mean: Vec<f32> = sum.iter().map(|x| x / ranks as f32).collect();
        let part = sum[rank * LEN / ranks..][..LEN / ranks].to_vec();
        let end = (0..LEN).map(|i| (2.0 * sum[i] + mean[i] + max[i]) * ranks as f32 + sum[i]).collect();
        let expected =
            [("sum", sum.clone()), ("mean", mean), ("max", max), ("part", part), ("whole", sum), ("e", end)];
        for (name, values) in expected {
            let got = executor.read_f32(Which::Last, name).unwrap().unwrap();
            assert!(got == values, "round {round}: {name} of rank {rank} is wrong: {:?}…", &got[..4]);
        }
    }
    let times = executor.profile(Which::Last, &header, 2).unwrap();
    assert_eq!(times.iter().filter(|time| time.op.starts_with("all_") && time.seconds > 0.0).count(), 6);
}

/// Whether kernels are there for the plan can be told without a GPU.
#[test]
fn the_plans_are_whole() {
    for ranks in [1, 2, 4] {
        let program = program(ranks);
        program.last.check().unwrap();
        let kernels = cuda::kernels_of(&program, &cuda::action::Facts::h200(), false).unwrap();
        assert!(kernels.contains(&cuda::collectives::clock()));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn through_the_host_every_collective_gives_its_result() {
    for ranks in [1, 2, 4] {
        let ends = on_each(ranks, |member| {
            let comm = GpuComm::Host(member.world.clone());
            let mut executor = executor(ranks, Some(comm)).map_err(|error| error.to_string())?;
            try_all(&mut executor, member.place.rank, ranks);
            Ok(())
        });
        ends.into_iter().for_each(Result::unwrap);
    }
}

/// Needs `VITESSE_NCCL`, or an NCCL that the system has.
#[test]
#[ignore = "needs a GPU and NCCL"]
fn nccl_alone_runs_every_collective_in_a_graph() {
    let library = Library::find().unwrap_or_else(|error| panic!("{error}; {VARIABLE} names the file"));
    println!("{}, version {}", library.path(), library.version());
    for orderly in [true, false] {
        let world = Communicator::solo();
        let comm = GpuComm::Nccl { world, library: library.clone(), monitor: None };
        let mut executor = executor(1, Some(comm)).unwrap();
        try_all(&mut executor, 0, 1);
        if orderly {
            executor.finish();
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_plan_for_other_ranks_is_refused() {
    let refused = |comm| executor(2, comm).err().unwrap().to_string();
    assert_eq!(refused(None), "sum: all_reduce is among 2 ranks, but there is no communicator");
    let one = Some(GpuComm::Host(Communicator::solo()));
    assert_eq!(refused(one), "sum: all_reduce is among 2 ranks, but there is one");
}
