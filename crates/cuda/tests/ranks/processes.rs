//! Ranks that are processes of a test, and share a GPU over NCCL: each is on a host of its own, as far as NCCL knows.

use super::rank::OnGpu;
use super::zero::{Trained, over_nccl, trained};
use comm::nccl::Library;
use comm::{Backend, Options, Start};
use cuda::GpuComm;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Names the folder where a rank leaves what it has trained.
const FOLDER: &str = "VITESSE_TEST_ZERO";
/// Far longer than it takes: ranks take turns on the GPU.
const PATIENCE: Duration = Duration::from_secs(240);

fn file(number: usize, rank: usize) -> String {
    format!("{number}.{rank}.json")
}

/// A rank of a test that starts several.
#[test]
#[ignore = "run by the tests of several processes, which need a GPU and NCCL"]
fn a_rank_of_several() {
    let Ok(folder) = std::env::var(FOLDER) else {
        return testing::inapplicable("it is a rank of other tests");
    };
    let options = Options { comm: Some(Backend::Nccl), ranks: None, timeout: None };
    let member = match comm::start(&options, |line| eprintln!("{line}")) {
        Ok(Start::Process(member)) => member,
        Ok(Start::Threads(_)) => panic!("one rank of several processes"),
        Err(error) => panic!("{error}"),
    };
    let library = Library::find().unwrap();
    let ended = member.run(|member| {
        for (number, (case, zero)) in over_nccl(member.place.world).into_iter().enumerate() {
            let (world, library) = (member.world.clone(), library.clone());
            let comm = GpuComm::Nccl { world, library, monitor: None };
            let began = Instant::now();
            let mut rank = OnGpu::over(case.on_gpu(zero), Some(comm));
            let trained = trained(&mut rank, member.place.rank, &case);
            rank.executor.finish();
            let seconds = began.elapsed().as_secs_f64();
            println!("rank {}: {case:?}, stage {zero}: {seconds:.1} s", member.place.rank);
            let path = PathBuf::from(&folder).join(file(number, member.place.rank));
            std::fs::write(path, serde_json::to_vec(&trained).unwrap()).map_err(|error| error.to_string())?;
        }
        Ok::<(), String>(())
    });
    ended.unwrap();
}

/// What each rank has trained of each case: of every case the ranks.
pub fn among_processes(ranks: usize) -> Vec<Vec<Trained>> {
    let folder = std::env::temp_dir().join(format!("vitesse-zero-{}-{ranks}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "processes::a_rank_of_several", "--ignored", "--nocapture"]);
        let (number, world) = (rank.to_string(), ranks.to_string());
        command.env(FOLDER, &folder).env("RANK", &number).env("WORLD_SIZE", &world);
        command.env("LOCAL_RANK", &number).env("LOCAL_WORLD_SIZE", &world);
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        command.env("NCCL_HOSTID", format!("rank-{rank}")).env("NCCL_SOCKET_IFNAME", "lo");
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<Child> = (0..ranks).map(start).collect();
    let outputs = wait(children);
    for (rank, (is_good, text)) in outputs.iter().enumerate() {
        assert!(is_good, "rank {rank}: {text}\n{}", outputs.iter().map(|o| &o.1[..]).collect::<String>());
        println!("{text}");
    }
    let read = |number: usize, rank: usize| {
        serde_json::from_slice(&std::fs::read(folder.join(file(number, rank))).unwrap()).unwrap()
    };
    let cases = 0..over_nccl(ranks).len();
    let trained = cases.map(|number| (0..ranks).map(|rank| read(number, rank)).collect()).collect();
    std::fs::remove_dir_all(&folder).unwrap();
    trained
}

/// Whether each ended well, and what it said. Those that take too long are ended.
fn wait(mut children: Vec<Child>) -> Vec<(bool, String)> {
    let began = Instant::now();
    let outputs: Vec<_> = children
        .iter_mut()
        .map(|child| {
            let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
            let read = |mut from: Box<dyn std::io::Read + Send>| {
                std::thread::spawn(move || {
                    let mut text = String::new();
                    let _ = from.read_to_string(&mut text);
                    text
                })
            };
            (read(Box::new(out)), read(Box::new(err)))
        })
        .collect();
    while children.iter_mut().any(|child| child.try_wait().unwrap().is_none()) {
        if began.elapsed() > PATIENCE {
            children.iter_mut().for_each(|child| drop(child.kill()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let ends = children.iter_mut().map(|child| child.wait().unwrap().success());
    ends.zip(outputs)
        .map(|(is_good, (out, err))| (is_good, out.join().unwrap() + &err.join().unwrap()))
        .collect()
}
