//! Live pages of real runs: what `train --serve` and `vitesse serve` show in a browser, while a run goes on and when it has ended.
//! `VITESSE_SHOTS=DIR` keeps pictures to look at.

mod common;

#[allow(dead_code)]
#[path = "../../study/tests/browser/chromium.rs"]
mod chromium;
#[allow(dead_code)]
#[path = "../../study/tests/browser/looks.rs"]
mod looks;

use chromium::{Chromium, Page};
use common::{Folder, text};
use looks::{draws, keep_page, ready};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use testing::need;

/// The URL in a line that begins like this, and what is behind its host and port.
fn url(line: &str, begins: &str) -> (String, String, String) {
    let url = line.trim().strip_prefix(begins).unwrap_or_else(|| panic!("{line}")).to_string();
    let (address, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
    assert!(path.len() == 33 && path.ends_with('/'), "{line}");
    (url.clone(), address.to_string(), format!("/{path}"))
}

/// Starts a run and reads the line that says where its page is. The rest of what it says is read, and not kept.
fn serving(folder: &Folder, args: &[&str]) -> (Child, (String, String, String)) {
    let mut child = folder.command(common::VITESSE, args).stdout(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    std::thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
    (child, url(&line, "live page: "))
}

/// Waits until the page shows that the run has finished, however long it trains.
fn watch_to_the_end(page: &mut Page, child: &mut Child) {
    let mut ended: Option<Instant> = None;
    while page.run("document.getElementById('state').textContent.includes('finished')") != true {
        if child.try_wait().unwrap().is_some() {
            let since = ended.get_or_insert_with(Instant::now).elapsed();
            assert!(since < Duration::from_secs(60), "the page does not show that the run has finished");
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn asked(address: &str, path: &str, host: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_run_is_served_at_a_port_or_a_host_behind_any_tunnel() {
    let folder = Folder::new("live");
    for (args, line) in [
        (&["--serve", "0", "--steps", "2"][..], "vitesse: --serve: needs --out"),
        (
            &["--out", "a", "--serve", "nonsense"],
            "give a port, a host, or both, such as 9999, localhost:8433 or 0.0.0.0:8420",
        ),
        (&["--out", "a", "--serve", "65536"], "a port is at most 65535"),
        (
            &["--out", "a", "--serve", "no-such-host.invalid:1", "--steps", "2"],
            "vitesse: --serve no-such-host.invalid:1: the live page can't be served there",
        ),
    ] {
        let output = folder.start(&[&["train"], args].concat()).wait_with_output().unwrap();
        assert!(!output.status.success() && text(&output).contains(line), "{args:?}: {}", text(&output));
        assert!(!folder.0.join("a").exists(), "{args:?}");
    }
    let args =
        ["train", "--out", "run", "--serve", "localhost:0", "--model", "vit-nano/8", "--epochs", "1000"];
    let (mut child, (_, address, path)) = serving(&folder, &args);
    // The same port again is refused in one line, before there is a folder.
    let again = folder.start(&["train", "--out", "again", "--serve", &address]).wait_with_output().unwrap();
    assert!(
        text(&again).contains(&format!("vitesse: --serve {address}: something is served there already")),
        "{}",
        text(&again)
    );
    assert!(!folder.0.join("again").exists());
    let refused = asked(&address, "/", &address);
    assert!(
        refused.starts_with("HTTP/1.1 403 ") && refused.contains("this page needs its token"),
        "{refused}"
    );
    let seen = loop {
        // As a browser behind `ssh -L 9000:localhost:PORT` asks.
        let answer = asked(&address, &format!("{path}live.json"), "localhost:9000");
        let live: Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
        if live["sections"]["figures"].as_str().is_some_and(|html| html.contains("id=\"loss\"")) {
            break live;
        }
        assert!(child.try_wait().unwrap().is_none(), "ended without a figure");
        std::thread::sleep(Duration::from_millis(200));
    };
    assert_eq!((&seen["title"], &seen["word"]), (&"run".into(), &"running".into()));
    assert_eq!(seen["about"], "vit-nano/8 · synthetic · 20,000 images · 1 rank");
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Photographs, masks and a network whose images have two sides: their records differ from a ViT's on synthetic images.
#[test]
fn runs_on_files_are_described_like_any_other() {
    let folder = Folder::new("live-files");
    let made = ["--train-samples", "8", "--test-samples", "4", "--image-size", "32"];
    folder.run(&[&["data", "make", "photos"][..], &made].concat());
    folder.run(&[&["data", "make", "streets", "--task", "segment"][..], &made].concat());
    let runs = [
        ("photos", "folder:photos", "vit-nano/8"),
        ("windows", "folder:photos", "swinv2-nano/w8"),
        ("streets", "masks:streets", "swinv2-nano/w8+upernet"),
    ];
    for (out, data, model) in runs {
        let out = format!("runs/{out}");
        let flags = ["--image-size", "32", "--batch-size", "4", "--steps", "1", "--threads", "1"];
        folder.run(&[&["train", "--data", data, "--model", model, "--out", &out][..], &flags].concat());
    }
    let mut server = folder.command(common::VITESSE, &["serve", "runs", "--address", "0"]).spawn().unwrap();
    let mut line = String::new();
    let mut says = BufReader::new(server.stdout.take().unwrap());
    says.read_line(&mut line).unwrap();
    let (_, address, path) = self::url(&line, "runs: ");
    for (out, data, model) in runs {
        let answer = asked(&address, &format!("{path}run/{out}/live.json"), &address);
        let live: Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
        assert_eq!(live["about"], format!("{model} · {data} · 8 images · 1 rank"), "{out}");
        let facts = live["sections"]["facts"].as_str().unwrap();
        for told in ["8 training images, 4 of validation, 4 classes", "32 px", "1 epoch, 1 step<", "adamw"] {
            assert!(facts.contains(told), "{out}: {told}: {facts}");
        }
        let listed = asked(&address, &format!("{path}live.json"), &address);
        assert!(listed.contains(&format!("{model} · {data}")), "{out}: {listed}");
    }
    server.kill().unwrap();
    server.wait().unwrap();
}

/// Two ranks train while a phone looks on, to their end; then all runs are listed, one of masks and one that was stopped among them.
#[test]
#[ignore = "takes minutes on a busy machine; .ci/slow runs it"]
fn real_runs_are_watched_to_their_end_and_listed() {
    let folder = Folder::new("live-real");
    let browser =
        testing::tools::chromium().map(|program| Chromium::start(&program, folder.0.join("browser")));
    let mut browser = need!(browser);
    let small = ["--train-samples", "256", "--test-samples", "64"];
    let args = [
        "train",
        "--out",
        "runs/ranks",
        "--serve",
        "0",
        "--model",
        "vit-nano/8",
        "--ranks",
        "2",
        "--steps",
        "120",
    ];
    let (mut child, (url, _, _)) = serving(&folder, &[&args[..], &small].concat());
    let mut page = browser.open(&url, (390, 844), "dark");
    ready(&mut page, "document.getElementById('state').textContent.endsWith(' left')");
    keep_page(&mut page, "running");
    watch_to_the_end(&mut page, &mut child);
    assert!(child.wait().unwrap().success());
    let state = page.run("document.getElementById('state').textContent");
    assert_eq!(state, "epoch 60 of 60 · step 120 of 120 · finished");
    draws(&mut page, "finished", &["loss", "accuracy", "optimizer", "rate", "ranks"]);
    keep_page(&mut page, "finished-phone");
    page.close();

    folder.run(
        &[
            &["train", "--out", "runs/masks", "--task", "segment", "--steps", "30", "--eval-every", "10it"],
            &small[..],
        ]
        .concat(),
    );
    let failed = folder.start(&[
        "train",
        "--out",
        "runs/failed",
        "--lr",
        "1e30",
        "--optimizer",
        "sgd",
        "--clip",
        "0",
        "--steps",
        "50",
    ]);
    drop(failed.wait_with_output());
    let mut server = folder.command(common::VITESSE, &["serve", "runs", "--address", "0"]).spawn().unwrap();
    let mut line = String::new();
    // Kept until the end: what it says next has to go somewhere.
    let mut says = BufReader::new(server.stdout.take().unwrap());
    says.read_line(&mut line).unwrap();
    let (url, _, _) = self::url(&line, "runs: ");
    let mut page = browser.open(&url, (1280, 900), "light");
    ready(&mut page, "document.querySelectorAll('.runs li').length >= 2");
    keep_page(&mut page, "list-real");
    page.go("[href='run/masks/']");
    ready(
        &mut page,
        "document.getElementById('state').textContent === 'epoch 1 of 1 · step 30 of 30 · finished'",
    );
    draws(&mut page, "masks", &["loss", "accuracy", "miou", "optimizer", "rate", "ranks"]);
    keep_page(&mut page, "masks");
    let facts = page.run("document.getElementById('facts').textContent");
    assert!(facts.as_str().unwrap().contains("--task segment"), "{facts}");
    page.close();
    // It ends well when it is told to.
    server.kill().unwrap();
    server.wait().unwrap();
}

#[test]
fn what_can_t_be_served_is_refused_in_a_line() {
    let folder = Folder::new("live-refused");
    std::fs::create_dir_all(folder.0.join("runs")).unwrap();
    for (args, line) in [
        (&["serve", "nowhere"][..], "vitesse: nowhere: is no folder"),
        (&["serve", "runs", "--address", "x"], "give a port, a host, or both"),
        (&["study", "--serve", "quick"], "give a port, a host, or both"),
    ] {
        let output = folder.start(args).wait_with_output().unwrap();
        assert!(!output.status.success() && text(&output).contains(line), "{args:?}: {}", text(&output));
    }
}
