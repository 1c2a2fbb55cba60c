//! Choice of a GPU for every rank, among those that each can see.
//!
//! A launcher may show a rank all GPUs of its machine, its own alone, or those near its cores (`srun --gpu-bind`). The driver numbers
//! them from 0 for each rank, so that only their identities tell which are the same.

/// What a rank can see.
pub struct View<'a> {
    /// Identities of the GPUs, by number.
    pub gpus: &'a [String],
    /// Rank among those of the same machine.
    pub local_rank: usize,
}

impl View<'_> {
    /// Numbers of the GPUs, the preferred first: that of the local rank.
    fn wishes(&self) -> impl Iterator<Item = usize> {
        let count = self.gpus.len();
        (0..count).map(move |shift| (self.local_rank + shift) % count)
    }
}

/// Number of the GPU of every rank, in its own numbering: one of its own, as far as there are enough. The rest share those that the
/// fewest ranks use.
pub fn choose(views: &[View]) -> Vec<Option<usize>> {
    let mut chosen: Vec<Option<usize>> = vec![None; views.len()];
    for rank in 0..views.len() {
        find_own(views, &mut chosen, rank, &mut vec![false; views.len()]);
    }
    for rank in 0..views.len() {
        if chosen[rank].is_none() {
            let users = |number: &usize| users(views, &chosen, &views[rank].gpus[*number]).count();
            chosen[rank] = views[rank].wishes().min_by_key(users);
        }
    }
    chosen
}

fn users<'a>(
    views: &'a [View],
    chosen: &'a [Option<usize>],
    gpu: &'a str,
) -> impl Iterator<Item = usize> + 'a {
    let uses = move |rank: &usize| chosen[*rank].is_some_and(|number| views[*rank].gpus[number] == gpu);
    (0..views.len()).filter(uses)
}

/// Finds a GPU that no other rank has. One that has such a GPU moves to another, where it sees a free one.
fn find_own(views: &[View], chosen: &mut [Option<usize>], rank: usize, tried: &mut [bool]) -> bool {
    tried[rank] = true;
    let wishes: Vec<usize> = views[rank].wishes().collect();
    let free = |number: &usize, chosen: &[Option<usize>]| {
        users(views, chosen, &views[rank].gpus[*number]).next().is_none()
    };
    if let Some(number) = wishes.iter().find(|number| free(number, chosen)) {
        chosen[rank] = Some(*number);
        return true;
    }
    for number in wishes {
        let owner = users(views, chosen, &views[rank].gpus[number]).find(|other| !tried[*other]);
        if let Some(owner) = owner
            && find_own(views, chosen, owner, tried)
        {
            chosen[rank] = Some(number);
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the driver shows of a machine's GPUs under a value of CUDA_VISIBLE_DEVICES: numbers, or beginnings of identities.
    fn shown(variable: Option<&str>, machine: &[&str]) -> Vec<String> {
        let Some(variable) = variable else { return machine.iter().map(|gpu| gpu.to_string()).collect() };
        let find = |word: &str| match word.parse::<usize>() {
            Ok(number) => machine.get(number).copied(),
            Err(_) if word.is_empty() => None,
            Err(_) => machine.iter().find(|gpu| gpu.starts_with(word)).copied(),
        };
        variable.split(',').map_while(find).map(str::to_string).collect()
    }

    /// A task: its SLURM_LOCALID, its CUDA_VISIBLE_DEVICES, and the GPUs that its cgroup lets it open.
    type Task<'a> = (usize, Option<&'a str>, &'a [&'a str]);

    /// The GPU of each task.
    fn gpus(tasks: &[Task]) -> Vec<String> {
        let shown: Vec<Vec<String>> =
            tasks.iter().map(|(_, variable, machine)| self::shown(*variable, machine)).collect();
        let views: Vec<View> = tasks
            .iter()
            .zip(&shown)
            .map(|((local_rank, ..), gpus)| View { gpus, local_rank: *local_rank })
            .collect();
        let name = |(number, gpus): (Option<usize>, &Vec<String>)| match number {
            Some(number) => gpus[number].clone(),
            None => "none".to_string(),
        };
        choose(&views).into_iter().zip(&shown).map(name).collect()
    }

    const NODE: [&str; 4] = ["GPU-a0", "GPU-a1", "GPU-a2", "GPU-a3"];
    const OTHER: [&str; 4] = ["GPU-b0", "GPU-b1", "GPU-b2", "GPU-b3"];

    /// Tasks of one node, by what each is shown.
    fn on_node<'a>(variables: [Option<&'a str>; 4]) -> Vec<Task<'a>> {
        variables.into_iter().enumerate().map(|(local, variable)| (local, variable, &NODE[..])).collect()
    }

    #[test]
    fn every_task_that_sees_all_gpus_uses_that_of_its_number() {
        // srun --gpus-per-node=4 or --gres=gpu:4; and a node without Slurm's plugin for GPUs, where nothing is set.
        assert_eq!(gpus(&on_node([Some("0,1,2,3"); 4])), NODE);
        assert_eq!(gpus(&on_node([None; 4])), NODE);
        // Two nodes: the same numbers are other GPUs.
        let two: Vec<Task> = [&NODE, &OTHER]
            .into_iter()
            .flat_map(|node| (0..2).map(|local| (local, Some("0,1"), &node[..])))
            .collect();
        assert_eq!(gpus(&two), ["GPU-a0", "GPU-a1", "GPU-b0", "GPU-b1"]);
    }

    #[test]
    fn every_task_that_sees_one_gpu_uses_that_one() {
        // srun --gpus-per-task=1 or --gpu-bind=single:1: by number.
        assert_eq!(gpus(&on_node([Some("0"), Some("1"), Some("2"), Some("3")])), NODE);
        // With ConstrainDevices=yes each task's cgroup has one, which is number 0 for all.
        let constrained: Vec<Task> = NODE
            .iter()
            .enumerate()
            .map(|(local, gpu)| (local, Some("0"), std::slice::from_ref(gpu)))
            .collect();
        assert_eq!(gpus(&constrained), NODE);
        // srun --gpu-bind=map_gpu:3,2,1,0.
        let mapped = gpus(&on_node([Some("3"), Some("2"), Some("1"), Some("0")]));
        assert_eq!(mapped, ["GPU-a3", "GPU-a2", "GPU-a1", "GPU-a0"]);
        // Identities, as sites' own prologs set them, and instances of a divided GPU.
        let named = on_node([Some("GPU-a2"), Some("GPU-a0"), Some("GPU-a3"), Some("GPU-a1")]);
        assert_eq!(gpus(&named), ["GPU-a2", "GPU-a0", "GPU-a3", "GPU-a1"]);
        let instances = ["MIG-5c", "MIG-77"];
        let divided: Vec<Task> = vec![(0, Some("MIG-77"), &instances), (1, Some("MIG-5c"), &instances)];
        assert_eq!(gpus(&divided), ["MIG-77", "MIG-5c"]);
    }

    #[test]
    fn tasks_that_see_a_part_of_the_gpus_still_get_one_each() {
        // srun --gpu-bind=closest: tasks are dealt to the two sockets in turn, and see the GPUs of theirs. By number alone tasks 0
        // and 2 would share GPU 0, and GPU 1 would idle.
        let closest = on_node([Some("0,1"), Some("2,3"), Some("0,1"), Some("2,3")]);
        assert_eq!(gpus(&closest), ["GPU-a0", "GPU-a3", "GPU-a1", "GPU-a2"]);
        // srun --gpus-per-task=2: the second of each idles.
        let pairs = gpus(&[(0, Some("0,1"), &NODE), (1, Some("2,3"), &NODE)]);
        assert_eq!(pairs, ["GPU-a0", "GPU-a3"]);
        // One that has a choice makes room for one that has none.
        assert_eq!(gpus(&[(0, Some("0,1"), &NODE), (1, Some("0"), &NODE)]), ["GPU-a1", "GPU-a0"]);
    }

    #[test]
    fn more_tasks_than_gpus_share_them_evenly() {
        let tasks: Vec<Task> = (0..6).map(|local| (local, Some("0,1"), &NODE[..])).collect();
        let expected = ["GPU-a0", "GPU-a1", "GPU-a0", "GPU-a1", "GPU-a0", "GPU-a1"];
        assert_eq!(gpus(&tasks), expected);
        assert_eq!(gpus(&[(0, Some(""), &NODE)]), ["none"], "CUDA_VISIBLE_DEVICES without a GPU shows none");
    }
}
