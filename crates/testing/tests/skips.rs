//! What a skipped test prints, and that it fails where it must not be skipped.

use std::process::{Command, Output};
use testing::{need, skip};

#[test]
#[ignore = "run by the other tests"]
fn skipping() {
    skip!("no {} was found", "tool");
}

#[test]
#[ignore = "run by the other tests"]
fn needing() {
    let found: u32 = need!(Ok::<u32, String>(7));
    assert_eq!(found, 7);
    need!(Err::<u32, String>("no other tool was found".into()));
    panic!("it goes on");
}

fn run(test: &str, required: &str, threads: &str) -> (Output, String) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--test-threads", threads]);
    let output = command.env("VITESSE_REQUIRE_ALL", required).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    let text = text.into_owned();
    (output, text)
}

#[test]
fn the_reason_is_printed_past_the_capture() {
    for (test, reason) in [("skipping", "no tool was found"), ("needing", "no other tool was found")] {
        let (output, text) = run(test, "0", "2");
        assert!(output.status.success(), "{text}");
        let line = format!("test {test} ... skipped: {reason}");
        assert!(String::from_utf8_lossy(&output.stderr).lines().any(|said| said == line), "{text}");
        let (output, text) = run(test, "0", "1");
        assert!(output.status.success() && text.contains(&format!("skipped: {reason}")), "{text}");
    }
}

#[test]
fn where_all_is_required_a_skip_fails() {
    for (test, reason) in [("skipping", "no tool was found"), ("needing", "no other tool was found")] {
        let (output, text) = run(test, "1", "2");
        assert!(!output.status.success(), "{text}");
        assert!(text.contains(&format!("skipped, but VITESSE_REQUIRE_ALL is 1: {reason}")), "{text}");
    }
}
