use super::*;

fn with<T>(variables: &[(&str, &str)], ask: impl Fn(Lookup) -> T) -> T {
    let find = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string());
    ask(&find)
}

/// Rank, world size, local rank and local world size.
fn place(variables: &[(&str, &str)]) -> (usize, usize, usize, usize, Launcher) {
    let p = with(variables, Place::find).unwrap_or_else(|problem| panic!("{problem}"));
    (p.rank, p.world, p.local_rank, p.local_world, p.launcher)
}

const MPIRUN: [(&str, &str); 4] = [
    ("OMPI_COMM_WORLD_RANK", "5"),
    ("OMPI_COMM_WORLD_SIZE", "8"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
];
const SRUN: [(&str, &str); 8] = [
    ("SLURM_JOB_ID", "1234"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_PROCID", "6"),
    ("SLURM_NTASKS", "7"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "3"),
    ("SLURM_STEP_TASKS_PER_NODE", "2(x3),1"),
    ("SLURM_STEP_NODELIST", "gpu[01-04]"),
];
const TORCHRUN: [(&str, &str); 6] = [
    ("RANK", "2"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_RANK", "0"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "head"),
    ("MASTER_PORT", "29500"),
];

fn changed(
    variables: &[(&'static str, &'static str)],
    more: &[(&'static str, &'static str)],
) -> Vec<(&'static str, &'static str)> {
    more.iter().chain(variables).copied().filter(|(_, value)| !value.is_empty()).collect()
}

#[test]
fn every_launcher_sets_rank_and_world_size() {
    assert_eq!(place(&[]), (0, 1, 0, 1, Launcher::Nothing));
    assert_eq!(place(&MPIRUN), (5, 8, 1, 4, Launcher::OpenMpi));
    assert_eq!(place(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")]), (1, 2, 0, 1, Launcher::Mpich));
    assert_eq!(place(&SRUN), (6, 7, 0, 1, Launcher::Srun));
    assert_eq!(place(&TORCHRUN), (2, 4, 0, 2, Launcher::Torchrun));
}

#[test]
fn the_shell_of_a_batch_script_is_no_rank() {
    let script: Vec<_> = SRUN.into_iter().filter(|(name, _)| *name != "SLURM_STEP_ID").collect();
    assert_eq!(place(&script), (0, 1, 0, 1, Launcher::Nothing));
    assert_eq!(place(&[("PMIX_RANK", "3")]), (0, 1, 0, 1, Launcher::Nothing));
}

/// What Slurm 22.05 sets for task 3 of `srun -N 2 -n 4`, by `scripts/slurm-test`'s cluster.
const TASK: [(&str, &str); 14] = [
    ("SLURM_JOB_ID", "12"),
    ("SLURM_JOB_NODELIST", "n[1-2]"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NNODES", "2"),
    ("SLURM_NODEID", "1"),
    ("SLURM_NPROCS", "4"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_PROCID", "3"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_STEP_NODELIST", "n[1-2]"),
    ("SLURM_STEP_NUM_NODES", "2"),
    ("SLURM_STEP_NUM_TASKS", "4"),
    ("SLURM_STEP_TASKS_PER_NODE", "2(x2)"),
    ("SLURM_TASKS_PER_NODE", "2(x2)"),
];

#[test]
fn tasks_of_a_real_cluster_find_their_place() {
    assert_eq!(place(&TASK), (3, 4, 1, 2, Launcher::Srun));
    assert_eq!(meets(&TASK).expect("a place").0, "n1");
    // The shell of its script: a task by PROCID and LOCALID, but of no step.
    let shell = [
        ("SLURM_JOB_ID", "11"),
        ("SLURM_JOB_NODELIST", "n1"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_NODEID", "0"),
        ("SLURM_NPROCS", "2"),
        ("SLURM_NTASKS", "2"),
        ("SLURM_PROCID", "0"),
        ("SLURM_TASKS_PER_NODE", "2"),
    ];
    assert_eq!(place(&shell), (0, 1, 0, 1, Launcher::Nothing));
}

#[test]
fn the_shell_of_an_interactive_step_starts_ranks_as_any_other() {
    let shell = changed(
        &TASK,
        &[
            ("SLURM_PROCID", "0"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_NODEID", "0"),
            ("SLURM_STEP_NUM_TASKS", "1"),
            ("SLURM_STEP_TASKS_PER_NODE", "1"),
        ],
    );
    assert_eq!(place(&shell), (0, 1, 0, 1, Launcher::Srun));
    assert_eq!(engine(&shell, None, Some(4), true), Ok(Backend::Threads));
    assert_eq!(engine(&shell, None, None, true), Ok(Backend::Threads));
    assert_eq!(engine(&shell, Some(Backend::Mpi), None, true), Ok(Backend::Mpi));
    assert!(engine(&TASK, None, Some(2), true).is_err(), "one of four tasks can't start two ranks");
}

#[test]
fn the_innermost_launcher_counts() {
    let mpirun_in_a_step = [&SRUN[..], &MPIRUN[..]].concat();
    assert_eq!(place(&mpirun_in_a_step), (5, 8, 1, 4, Launcher::OpenMpi));
    let torchrun_in_a_step = [&SRUN[..], &TORCHRUN[..], &[("TORCHELASTIC_RUN_ID", "x")]].concat();
    assert_eq!(place(&torchrun_in_a_step), (2, 4, 0, 2, Launcher::Torchrun));
    let srun_with_pmi = [&SRUN[..], &[("PMI_RANK", "6"), ("PMI_SIZE", "7")]].concat();
    assert_eq!(place(&srun_with_pmi), (6, 7, 0, 1, Launcher::Srun));
    let by_hand = [&SRUN[..], &[("RANK", "6"), ("WORLD_SIZE", "7")]].concat();
    assert_eq!(place(&by_hand), (6, 7, 0, 1, Launcher::Srun));
}

#[test]
fn invalid_variables_are_refused_by_name() {
    let refused = |variables: &[(&str, &str)], part: &str| {
        let problem = with(variables, Place::find).err().unwrap_or_default();
        assert!(problem.contains(part), "\"{part}\" is not in \"{problem}\"");
    };
    refused(&changed(&TORCHRUN, &[("RANK", "two")]), "RANK is \"two\", which is not a number");
    refused(&changed(&TORCHRUN, &[("RANK", "4")]), "RANK is 4, but WORLD_SIZE is 4");
    refused(&[("RANK", "0")], "RANK is set, but WORLD_SIZE is not");
    refused(&[("WORLD_SIZE", "2")], "WORLD_SIZE is set, but RANK is not");
    refused(&[("RANK", "0"), ("WORLD_SIZE", "0")], "WORLD_SIZE is 0");
    refused(&changed(&TORCHRUN, &[("LOCAL_RANK", "2")]), "LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2");
    refused(&changed(&SRUN, &[("SLURM_LOCALID", "1")]), "SLURM_LOCALID is 1");
    refused(
        &changed(&SRUN, &[("SLURM_STEP_TASKS_PER_NODE", "2(3)")]),
        "SLURM_STEP_TASKS_PER_NODE is \"2(3)\"",
    );
    refused(&[&MPIRUN[..], &TORCHRUN[..]].concat(), "RANK is 2, but OMPI_COMM_WORLD_RANK is 5: unset RANK");
}

#[test]
fn lists_of_nodes_are_written_out() {
    let nodes = |list| expand_nodes(list).unwrap_or_else(|problem| panic!("{list}: {problem}")).join(" ");
    assert_eq!(nodes("gpu[01-04,7],login"), "gpu01 gpu02 gpu03 gpu04 gpu7 login");
    assert_eq!(nodes("one"), "one");
    assert_eq!(nodes("r[1-2]n[09-10]"), "r1n09 r1n10 r2n09 r2n10");
    assert_eq!(nodes("n[1-2].cluster,m"), "n1.cluster n2.cluster m");
    for wrong in ["", "a,,b", "a[1-", "a]", "a[1[2]]", "a[2-1]", "a[x]", "a[]", "a[1-99999999999]"] {
        assert!(expand_nodes(wrong).is_err(), "{wrong}");
    }
}

/// Host and port at which the ranks connect.
fn meets(variables: &[(&str, &str)]) -> Result<(String, u16), String> {
    with(variables, |var| master_address(&Place::find(var)?, var))
        .map(|master_address| (master_address.host, master_address.port))
}

#[test]
fn ranks_connect_at_the_address_of_the_launcher() {
    assert_eq!(meets(&TORCHRUN), Ok(("head".to_string(), 29500)));
    let agent = [&TORCHRUN[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
    assert_eq!(meets(&agent), Ok(("head".to_string(), 29501)));
    let (host, port) = meets(&SRUN).expect("a place");
    assert_eq!(host, "gpu01");
    assert!((15_000..31_000).contains(&port), "{port}");
    let (_, other) = meets(&changed(&SRUN, &[("SLURM_JOB_ID", "1235")])).expect("a place");
    assert_ne!(port, other, "jobs on the same host need ports of their own");
    let script = [&SRUN[..], &[("MASTER_ADDR", "gpu02"), ("MASTER_PORT", "17000")]].concat();
    assert_eq!(meets(&script), Ok(("gpu02".to_string(), 17000)));
}

#[test]
fn an_invalid_address_is_refused() {
    let refused = |variables: &[(&str, &str)], part: &str| {
        let problem = meets(variables).err().unwrap_or_default();
        assert!(problem.contains(part), "\"{part}\" is not in \"{problem}\"");
    };
    refused(&changed(&TORCHRUN[..4], &[]), "MASTER_ADDR is not set");
    refused(&TORCHRUN[..5], "MASTER_PORT is not");
    for port in ["0", "70000", "x"] {
        refused(&[&[("MASTER_PORT", port)], &TORCHRUN[..5]].concat(), "MASTER_PORT is \"");
    }
    refused(
        &changed(&SRUN, &[("SLURM_STEP_NODELIST", "gpu[1")]),
        "SLURM_STEP_NODELIST is \"gpu[1\": a bracket",
    );
}

fn engine(
    variables: &[(&str, &str)],
    asked: Option<Backend>,
    ranks: Option<usize>,
    mpi: bool,
) -> Result<Backend, String> {
    with(variables, |var| choose_backend(asked, ranks, &Place::find(var)?, Built { mpi }, var))
}

#[test]
fn the_backend_fits_the_launcher() {
    assert_eq!(engine(&[], None, Some(4), true), Ok(Backend::Threads));
    assert_eq!(engine(&MPIRUN, None, None, true), Ok(Backend::Mpi));
    assert_eq!(engine(&MPIRUN, Some(Backend::Tcp), Some(8), false), Ok(Backend::Tcp));
    assert_eq!(engine(&TORCHRUN, None, None, true), Ok(Backend::Tcp));
    assert_eq!(engine(&SRUN, None, None, true), Ok(Backend::Tcp));
    assert_eq!(
        engine(&[], Some(Backend::Nccl), Some(2), true),
        Ok(Backend::Threads),
        "NCCL works with_engine a world"
    );
    assert_eq!(engine(&MPIRUN, Some(Backend::Nccl), None, true), Ok(Backend::Mpi));
    assert_eq!(engine(&TORCHRUN, Some(Backend::Nccl), None, true), Ok(Backend::Tcp));
    let pmix = [&SRUN[..], &[("SLURM_MPI_TYPE", "pmix")]].concat();
    assert_eq!(engine(&pmix, None, None, true), Ok(Backend::Mpi));
    assert_eq!(engine(&pmix, None, None, false), Ok(Backend::Tcp));
}

#[test]
fn an_impossible_backend_is_refused_with_a_remedy() {
    let refused = |answer: Result<Backend, String>, parts: &[&str]| {
        let problem = answer.err().unwrap_or_default();
        assert!(parts.iter().all(|part| problem.contains(part)), "{parts:?} is not in \"{problem}\"");
    };
    refused(engine(&MPIRUN, None, None, false), &["without MPI", "--features mpi", "--comm tcp"]);
    refused(engine(&MPIRUN, None, Some(4), true), &["--ranks 4, but mpirun started 8"]);
    refused(engine(&TORCHRUN, Some(Backend::Threads), None, true), &["torchrun started 4 processes"]);
    refused(engine(&[], Some(Backend::Tcp), Some(2), true), &["--comm tcp needs a launcher"]);
    refused(engine(&[], None, Some(0), true), &["at least 1"]);
}

#[test]
fn backends_are_printed_as_they_are_typed() {
    for name in ["threads", "mpi", "tcp", "nccl"] {
        assert_eq!(name.parse::<Backend>().map(|backend| backend.to_string()), Ok(name.to_string()));
    }
    assert!("gloo".parse::<Backend>().is_err());
}
