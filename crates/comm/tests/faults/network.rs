//! Ranks in two network namespaces, and the cable between them cut.

use super::SOON;
use super::ranks::{Ranks, assert_has, one_line};
use std::process::Command;
use std::time::Duration;

/// Two namespaces joined by a cable; gone with this.
struct Network {
    names: [String; 2],
}

impl Network {
    /// An error where this user can't make them.
    fn new() -> Result<Self, String> {
        testing::tools::namespaces()?;
        let id = std::process::id() % 10_000;
        let network = Network { names: ["a", "b"].map(|end| format!("vt{end}{id}")) };
        let [a, b] = &network.names;
        let made = ip(&["netns", "add", a]) && ip(&["netns", "add", b]);
        let joined =
            made && ip(&["link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b]);
        let up = |end: &String, address: &str| {
            ip(&["-n", end, "link", "set", "lo", "up"])
                && ip(&["-n", end, "addr", "add", address, "dev", end])
                && ip(&["-n", end, "link", "set", end, "up"])
        };
        assert!(joined && up(a, "10.97.13.1/24") && up(b, "10.97.13.2/24"), "namespaces, but no cable");
        Ok(network)
    }

    fn cut(&self) {
        assert!(ip(&["-n", &self.names[1], "link", "set", &self.names[1], "down"]));
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in &self.names {
            ip(&["netns", "del", name]);
        }
    }
}

fn ip(args: &[&str]) -> bool {
    Command::new("ip")
        .args(args)
        .stderr(std::process::Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

#[test]
fn a_cut_between_two_hosts_ends_the_ranks_on_both_sides() {
    let network = testing::need!(Network::new());
    let mut ranks = Ranks::new("cut");
    ranks.address = "10.97.13.1".to_string();
    for rank in 0..4 {
        let by = ["ip", "netns", "exec", &network.names[rank / 2]];
        ranks.start_within(&by, "work", rank, 4, 3000);
    }
    ranks.are_working();
    network.cut();
    let outcomes = ranks.end_within(Duration::from_secs(3) + SOON);
    assert!(outcomes.iter().all(|outcome| !outcome.status.success()));
    let (line, _) = one_line(&outcomes);
    assert_has(
        &line,
        &[
            "ranks 2 and 3 (host ",
            "sent no heartbeat for 3 s",
            // A rank may have had all of a call of which another misses a part.
            "for them in all_reduce #",
            "of blocks.7",
        ],
    );
}
