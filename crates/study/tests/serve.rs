//! The live page's server: what it answers, what it refuses, and that it ends.

use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use study::grid::Planned;
use study::results::{FORMAT, Point, Results};
use study::sample;
use study::serve::{Clock, Server, Shows, Token};
use study::spec::Study;
use study::store::Plan;
use testing::Folder;

fn any_port() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

/// A clock that moves when it is told to.
#[derive(Default)]
struct Told(Mutex<Duration>);

impl Told {
    fn advance(&self, time: Duration) {
        *self.0.lock().unwrap() += time;
    }
}

impl Clock for Told {
    fn now(&self) -> Duration {
        *self.0.lock().unwrap()
    }

    fn sleep(&self, time: Duration) {
        self.advance(time);
    }
}

/// A server, and the clock that tells it when what it shows is old.
fn start(folder: &Path) -> (Server, Arc<Told>) {
    showing(Shows::One(folder.to_path_buf()))
}

fn showing(shows: Shows) -> (Server, Arc<Told>) {
    let clock = Arc::new(Told::default());
    (Server::start_by(any_port(), shows, Token::random().unwrap(), clock.clone()).unwrap(), clock)
}

/// What comes back for bytes sent as they are.
fn raw(server: &Server, request: &str) -> String {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = vec![];
    // A refusal may end the connection before all was sent.
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

/// What comes back for a path below the server's own.
fn get(server: &Server, path: &str) -> (String, String) {
    let request = format!("GET {}{path} HTTP/1.1\r\nHost: {}\r\n\r\n", server.path(), server.address());
    let answer = raw(server, &request);
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    (head.to_string(), body.to_string())
}

/// What is there to see after a second.
fn live((server, clock): &(Server, Arc<Told>)) -> Value {
    clock.advance(Duration::from_secs(1));
    asked(server)
}

fn asked(server: &Server) -> Value {
    serde_json::from_str(&get(server, "live.json").1).unwrap()
}

fn step(step: u64, loss: f64) -> String {
    format!(
        "{{\"step\":{step},\"epoch\":1,\"loss\":{loss},\"lr\":0.001,\"images_per_second\":700.0,\"top1\":0.3,\"seconds\":0.1,\
         \"compute_seconds\":0.08,\"exchange_seconds\":0.01,\"wait_seconds\":0.0,\"data_seconds\":0.005,\"optimizer_seconds\":0.004,\
         \"idle_seconds\":0.001,\"hidden_exchange_seconds\":0.0}}\n"
    )
}

const CONFIG: &str = r#"{"model":"vit-<nano>","steps":200,"epochs":2,"world":2,"batch":32,"accumulate":1,"device":"cpu","precision":"fp32","threads":1,
    "seed":7,"data":{"source":"folder:/data/<photos>","facts":{"train_images":6400,"test_images":100,"classes":10}},
    "network":{"image":32},"optimizer":{"type":"adamw","weight_decay":0.05},"schedule":{"type":"cosine","peak":0.001,"warmup":10}}"#;

/// `run.json` of a run that this process started in this second.
fn launched(folder: &Path) {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let machine = json!({"host": "vm", "os": "", "kernel": "", "cpu": "EPYC", "threads": 2, "simd": "", "memory_bytes": 1});
    let command = ["vitesse", "train", "--out", "my runs/a"];
    let launch = json!([{"command": command, "folder": "/home/me", "started": now, "version": "0.1.0", "machine": machine}]);
    fs::write(folder.join("run.json"), launch.to_string()).unwrap();
    let me = records::Holder::me("0000000000".into());
    fs::write(folder.join(".lock"), serde_json::to_string(&me).unwrap()).unwrap();
}

fn figures(seen: &Value) -> &str {
    seen["sections"]["figures"].as_str().unwrap()
}

#[test]
fn a_run_is_seen_as_it_goes_on() {
    let folder = Folder::new("live-run");
    let run = folder.0.join("later");
    let server = start(&run);
    assert_eq!(live(&server)["state"], "starting · no step is written yet");
    fs::create_dir_all(&run).unwrap();
    fs::write(run.join("config.json"), CONFIG).unwrap();
    launched(&run);
    let metrics = run.join("metrics.jsonl");
    let first: String = (0..50).map(|i| step(i, 2.0 - 0.01 * i as f64)).collect();
    fs::write(&metrics, format!("{first}{}", "{\"step\":50,\"ep")).unwrap();
    let seen = live(&server);
    // 150 steps of 0.1 s; steps and epochs count from 1, as in the terminal.
    assert_eq!(seen["state"], "epoch 2 of 2 · step 50 of 200 · running · 15.0 s left");
    assert_eq!(
        (&seen["share"], &seen["ended"], &seen["word"]),
        (&json!(0.25), &json!(false), &json!("running"))
    );
    assert_eq!(seen["about"], "vit-<nano> · folder:<photos> · 6,400 images · 2 ranks");
    for id in ["loss", "accuracy", "optimizer", "rate", "ranks"] {
        assert!(figures(&seen).contains(&format!("<figure id=\"{id}\">")), "{id}");
    }
    assert!(figures(&seen).contains("compute: 80.0 ms (80%)"), "the account of time");
    assert!(
        figures(&seen).contains("training, step 50&#10;1.51, smoothed 1.5"),
        "smoothed, with the raw curve behind"
    );
    assert!(figures(&seen).contains(">Learning rate</text>") && !figures(&seen).contains(">Load</text>"));
    let log = |seen: &Value| seen["sections"]["log"].as_str().unwrap().to_string();
    assert!(
        log(&seen).contains("epoch 2 · step 50 · loss 1.5100 · lr 1.00e-3 · 700 images/s"),
        "{}",
        log(&seen)
    );
    let facts = seen["sections"]["facts"].as_str().unwrap();
    for part in [
        "<dd>folder:/data/&lt;photos&gt; · 6,400 training images, 100 of validation, 10 classes</dd>",
        "<dd>64 images: 32 images × 2 ranks</dd>",
        "<dd>adamw · weight decay 0.05 · learning rate 1e-3, cosine after 10 steps of warm-up</dd>",
        "<dd>vitesse train --out &#39;my runs/a&#39;</dd>",
        &format!("<dd>{}</dd>", run.display()),
        "<dt>network.image</dt><dd>32</dd>",
    ] {
        assert!(facts.contains(part), "{part}: {facts}");
    }
    // An evaluation, the ranks one by one, and what sensors of GPUs read.
    let text = fs::read_to_string(&metrics).unwrap().replace("{\"step\":50,\"ep", "");
    let sensed = step(50, 1.5).replace("}\n", ",\"gpu_load\":0.9,\"gpu_power\":512.0,\"grad_norm\":1.25}\n");
    let more = format!("{text}{sensed}{{\"step\":50,\"epoch\":1,\"eval_loss\":1.4,\"eval_top1\":0.5}}\n");
    fs::write(&metrics, more).unwrap();
    let rank = |rank: u32| {
        format!(
            "{{\"step\":50,\"rank\":{rank},\"seconds\":0.1,\"compute\":0.05,\"exchange\":0.05,\"wait\":0,\"data\":0,\"optimizer\":0,\"idle\":0,\"hidden_exchange\":0}}\n"
        )
    };
    fs::write(run.join("ranks.jsonl"), rank(0) + &rank(1)).unwrap();
    let gpu = json!({"step": 50, "epoch": 1, "rank": 1, "gpu": 3, "name": "NVIDIA H200", "load": 0.97, "memory_used": 4.2e10,
        "memory_free": 1e11, "memory_total": 1.5e11, "temperature": 64.0, "power": 540.0});
    fs::write(run.join("gpus.jsonl"), format!("{gpu}\n")).unwrap();
    let seen = live(&server);
    let drawn = figures(&seen);
    assert!(drawn.contains(">validation</text>") && drawn.contains(">rank 1</text>"));
    assert!(drawn.contains("Dots are evaluations.") && drawn.contains("validation, step 51&#10;50.0%"));
    assert!(
        drawn.contains(">Load</text>")
            && drawn.contains("power, w, step 51&#10;512")
            && drawn.contains(">Gradient norm</text>")
    );
    let gpus = "rank 1: GPU 3, NVIDIA H200 · load 97% · 42.0 GB of 150 GB · up to 64 °C · 540 W (epoch 2)";
    assert!(seen["sections"]["facts"].as_str().unwrap().contains(gpus));
    assert!(
        log(&seen).contains("epoch 2 · step 51 · validation: loss 1.4000 · top-1 50.00%"),
        "{}",
        log(&seen)
    );
    // A run that went back to a checkpoint is read anew.
    fs::write(&metrics, step(0, 9.0)).unwrap();
    assert_eq!(live(&server)["state"], "epoch 2 of 2 · step 1 of 200 · running · 19.9 s left");
    server.0.stop();
}

/// However a run ended, its page says so.
#[test]
fn the_end_of_a_run_is_seen() {
    let folder = Folder::new("live-end");
    let server = start(&folder.0);
    fs::write(folder.0.join("config.json"), CONFIG).unwrap();
    launched(&folder.0);
    fs::write(folder.0.join("metrics.jsonl"), (0..40).map(|i| step(i, 1.0)).collect::<String>()).unwrap();
    let end = |text: &str| fs::write(folder.0.join("ended.json"), text).unwrap();
    for (text, state, word) in [
        (r#"{"how":"stopped","why":"SIGTERM","steps":40,"ended":1}"#, "stopped by SIGTERM", "stopped"),
        (r#"{"how":"failed","why":"disk <full>","steps":40,"ended":1}"#, "failed: disk <full>", "failed"),
        (r#"{"how":"finished","steps":40,"ended":1}"#, "finished", "finished"),
    ] {
        end(text);
        let seen = live(&server);
        assert_eq!(seen["state"], format!("epoch 2 of 2 · step 40 of 200 · {state}"));
        assert_eq!((&seen["word"], &seen["ended"]), (&json!(word), &json!(true)));
    }
    assert_eq!(live(&server)["share"], 1.0, "a run that stopped early for good is at its end");
    // Killed: its lock names a process that is not there.
    fs::remove_file(folder.0.join("ended.json")).unwrap();
    let gone = records::Holder { started: "1".into(), ..records::Holder::me("0000000000".into()) };
    fs::write(folder.0.join(".lock"), serde_json::to_string(&gone).unwrap()).unwrap();
    assert!(live(&server)["state"].as_str().unwrap().ends_with("killed, or its machine went down"));
}

/// Whoever is looking when a run ends sees how it ended; nobody is waited for who doesn't look.
#[test]
fn whoever_looks_sees_the_end() {
    let folder = Folder::new("live-finish");
    fs::write(folder.0.join("config.json"), CONFIG).unwrap();
    launched(&folder.0);
    fs::write(folder.0.join("metrics.jsonl"), step(0, 1.0)).unwrap();
    let (server, _) = start(&folder.0);
    assert_eq!(asked(&server)["word"], "running");
    fs::write(folder.0.join("ended.json"), r#"{"how":"finished","steps":1,"ended":1}"#).unwrap();
    let (address, path) = (server.address(), server.path());
    let looking = std::thread::spawn(move || {
        loop {
            let Ok(mut stream) = TcpStream::connect(address) else { return "nothing".to_string() };
            write!(stream, "GET {path}live.json HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
            let mut answer = String::new();
            let _ = stream.read_to_string(&mut answer);
            if answer.contains("\"word\":\"finished\"") {
                return "the end".to_string();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    server.finish();
    assert_eq!(looking.join().unwrap(), "the end");
    let (unseen, _) = start(&folder.0);
    unseen.finish();
}

/// Runs and studies below a folder, each with its page; no name leads out of the folder.
#[test]
fn a_folder_of_runs_is_listed_and_each_has_its_page() {
    let folder = Folder::new("live-list");
    let runs = folder.0.join("runs");
    let server = showing(Shows::of(&runs));
    assert_eq!(live(&server)["state"], "0 runs");
    for name in ["a", "deep/b & c"] {
        fs::create_dir_all(runs.join(name)).unwrap();
        fs::write(runs.join(name).join("config.json"), CONFIG).unwrap();
        launched(&runs.join(name));
        fs::write(runs.join(name).join("metrics.jsonl"), step(9, 1.0)).unwrap();
    }
    fs::write(runs.join("a/ended.json"), r#"{"how":"finished","steps":40,"ended":1}"#).unwrap();
    fs::create_dir_all(runs.join("study")).unwrap();
    let mut results = sample::study();
    results.points.truncate(2);
    fs::write(runs.join("study/study.json"), serde_json::to_string(&plan(&results, 3)).unwrap()).unwrap();
    fs::write(folder.0.join("run.json"), "[]").unwrap();
    let seen = live(&server);
    assert_eq!(seen["state"], "2 runs · 1 study · 1 running · 1 finished · 1 stopped");
    let html = figures(&seen);
    assert!(html.contains("<a href=\"run/deep%2Fb%20%26%20c/\">deep/b &amp; c</a> <span class=\"how\">running · 10 of 200 steps</span>"), "{html}");
    assert!(html.contains("stopped · 0 of 6 runs done") && html.contains("loss 1.00 · 700 images/s"));
    assert!(html.contains("vit-&lt;nano&gt; · folder:&lt;photos&gt; · 2 ranks") && !html.contains("<nano>"));
    let (server, clock) = server;
    let page = |path: &str| get(&server, &format!("run/{path}"));
    assert!(page("deep%2Fb%20%26%20c/").1.contains("connect-src 'self'"));
    clock.advance(Duration::from_secs(60));
    let run: Value = serde_json::from_str(&page("deep%2Fb%20%26%20c/live.json").1).unwrap();
    assert_eq!(
        (&run["title"], &run["home"], &run["word"]),
        (&json!("b & c"), &json!(true), &json!("running"))
    );
    let study: Value = serde_json::from_str(&page("study/live.json").1).unwrap();
    assert_eq!(study["state"], "0 of 6 runs done · stopped");
    for (query, found) in
        [("?q=FINISHED", 1), ("?q=b+%26", 1), ("?q=nano", 2), ("?q=nothing", 0), ("?page=99", 3)]
    {
        clock.advance(Duration::from_secs(60));
        let seen: Value = serde_json::from_str(&get(&server, &format!("live.json{query}")).1).unwrap();
        assert_eq!(figures(&seen).matches("<li").count(), found, "{query}");
    }
    for path in [
        "..%2F/",
        "%2e%2e/live.json",
        "a%2F..%2F../",
        "deep/",
        "%2Fetc/",
        ".%2Fa/",
        "a",
        "a/run.json",
        "%zz/",
        "/",
        "a%00/",
    ] {
        let (head, body) = page(path);
        assert!(head.starts_with("HTTP/1.1 404 ") && body.lines().count() == 1, "{path}: {head}");
    }
    // One that vanished has no page.
    fs::remove_dir_all(runs.join("a")).unwrap();
    assert!(page("a/live.json").0.starts_with("HTTP/1.1 404 "));
    assert!(matches!(Shows::of(&runs.join("study")), Shows::One(_)));
}

/// Nothing is read or drawn for whoever asks again within a second.
#[test]
fn answers_are_kept_however_often_they_are_asked_for() {
    let folder = Folder::new("live-kept");
    let (server, clock) = start(&folder.0);
    let metrics = folder.0.join("metrics.jsonl");
    let mut states = std::collections::BTreeMap::new();
    for second in 0..4 {
        for i in 0..10 {
            let steps: String = (0..10 * second + i + 1).map(|n| step(n, 1.0)).collect();
            fs::write(&metrics, steps).unwrap();
            *states.entry(asked(&server)["state"].to_string()).or_insert(0) += 1;
        }
        clock.advance(Duration::from_secs(1));
    }
    let seen: Vec<(&str, i32)> = states.iter().map(|(state, times)| (state.as_str(), *times)).collect();
    let ended = "interrupted: its process was killed, or its machine went down";
    let drawn = |step: u32| format!("\"epoch 2 of 2 · step {step} of {step} · {ended}\"");
    let expected = [1, 11, 21, 31].map(drawn);
    assert_eq!(seen, expected.iter().map(|state| (state.as_str(), 10)).collect::<Vec<_>>());
}

/// The plan of a made-up study, as its folder has it.
fn plan(results: &Results, repeats: usize) -> Plan {
    let planned = |point: &Point| Planned {
        id: point.id.clone(),
        kind: point.kind,
        series: point.series.clone(),
        settings: point.settings.clone(),
        options: vec![],
        warmup: 0,
        oversubscribed: false,
        estimate: None,
    };
    Plan {
        format: FORMAT,
        version: results.version.clone(),
        started: results.started,
        folder: ".".into(),
        platform: results.platform.clone(),
        study: Study { title: results.title.clone(), repeats, ..Study::default() },
        points: results.points.iter().map(planned).collect(),
    }
}

#[test]
fn a_study_is_seen_point_by_point_and_its_run_step_by_step() {
    let folder = Folder::new("live-study");
    let server = start(&folder.0);
    let mut results = sample::study();
    results.title = sample::HOSTILE.into();
    results.points.truncate(3);
    let write = |name: &str, text: String| {
        let path = folder.0.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("study.json", serde_json::to_string(&plan(&results, 7)).unwrap());
    let seen = live(&server);
    assert_eq!((&seen["state"], &seen["share"]), (&json!("0 of 21 runs done · stopped"), &json!(0.0)));
    // Two points are measured, of the third a run is on its way.
    let bare = |point: &Point| Point { summary: None, limiter: None, flags: vec![], ..point.clone() };
    for point in &results.points[..2] {
        let file = json!({ "format": FORMAT, "point": bare(point) });
        write(&format!("points/{}.json", point.id), file.to_string());
    }
    write("points/9.json", "{".into());
    for done in 0..7 {
        write(&format!("runs/{}.{done}/metrics.jsonl", results.points[0].id), step(0, 1.0));
    }
    let run = format!("runs/{}.2", results.points[2].id);
    write(
        &format!("{run}/config.json"),
        "{\"model\":\"vit-b/16\",\"steps\":40,\"epochs\":1,\"world\":4}".into(),
    );
    write(&format!("{run}/metrics.jsonl"), (0..20).map(|i| step(i, 2.0)).collect());
    let seen = live(&server);
    assert_eq!(seen["state"], "14 of 21 runs done · 1 file that can't be read · stopped");
    assert!((seen["share"].as_f64().unwrap() - 14.5 / 21.0).abs() < 1e-9, "{}", seen["share"]);
    assert_eq!(seen["title"], sample::HOSTILE);
    assert!(seen["about"].as_str().unwrap().contains("2 ranks do "), "{}", seen["about"]);
    let figures = seen["sections"]["figures"].as_str().unwrap();
    assert!(figures.contains("<figure id=\"strong-time\">") && !figures.contains("<img"));
    let now = seen["sections"]["now"].as_str().unwrap();
    for part in ["4 ranks", "run 3 of 7", "step 20 of 40", "<figure id=\"loss\">", "<figure id=\"ranks\">"] {
        assert!(now.contains(part), "{part}: {now:.300}");
    }
    // Results of a study that was stopped don't end it; the last run does.
    write("results.json", serde_json::to_string(&results).unwrap());
    assert!(!live(&server)["state"].as_str().unwrap().contains("finished"));
    fs::remove_file(folder.0.join("points/9.json")).unwrap();
    let last = json!({ "format": FORMAT, "point": bare(&results.points[2]) });
    write(&format!("points/{}.json", results.points[2].id), last.to_string());
    let seen = live(&server);
    assert_eq!(seen["state"], "21 of 21 runs done · the study is finished");
    assert_eq!((&seen["sections"]["now"], &seen["share"]), (&json!(""), &json!(1.0)));
}

/// The token is all that is asked for: whatever name or port a tunnel or proxy has, and nothing without it.
#[test]
fn only_known_paths_behind_the_token_are_answered() {
    let folder = Folder::new("live-refusals");
    fs::write(folder.0.join("secret.txt"), "secret").unwrap();
    let server = Server::start(any_port(), Shows::One(folder.0.clone())).unwrap();
    let (host, own) = (server.address(), server.path());
    assert!(server.url() == format!("http://{host}{own}") && own.len() == 34, "{}", server.url());
    let (head, body) = get(&server, "");
    assert!(
        head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("X-Content-Type-Options: nosniff"),
        "{head}"
    );
    assert!(body.contains("connect-src 'self'") && body.contains("default-src 'none'"));
    assert!(
        !head.to_lowercase().contains("access-control") && !head.to_lowercase().contains("set-cookie"),
        "{head}"
    );
    let wrong = own.replace(|c: char| c.is_ascii_digit(), "x");
    let cases = [
        // Behind a tunnel on another port, or a proxy under another name.
        (format!("GET {own} HTTP/1.1\r\nHost: localhost:9000\r\n\r\n"), "200"),
        (format!("GET {own}live.json HTTP/1.1\r\nHost: gpu.cluster.example\r\n\r\n"), "200"),
        (format!("GET {} HTTP/1.1\r\nHost: {host}\r\n\r\n", own.trim_end_matches('/')), "308"),
        // Another user of the machine, or a page of another site whose name points here.
        (format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n"), "403"),
        (format!("GET /live.json HTTP/1.1\r\nHost: {host}\r\n\r\n"), "403"),
        (format!("GET /?token={} HTTP/1.1\r\nHost: {host}\r\n\r\n", own.trim_matches('/')), "403"),
        (format!("GET {wrong} HTTP/1.1\r\nHost: {host}\r\n\r\n"), "403"),
        ("GET /secret.txt HTTP/1.1\r\nHost: evil.example\r\n\r\n".to_string(), "403"),
        (format!("GET {own}secret.txt HTTP/1.1\r\nHost: {host}\r\n\r\n"), "404"),
        (format!("GET {own}../../etc/passwd HTTP/1.1\r\nHost: {host}\r\n\r\n"), "404"),
        (format!("GET {own}%2e%2e/secret.txt HTTP/1.1\r\nHost: {host}\r\n\r\n"), "404"),
        (format!("GET {own}run/secret.txt/ HTTP/1.1\r\nHost: {host}\r\n\r\n"), "404"),
        (format!("GET {own} HTTP/1.1\r\n\r\n"), "400"),
        (format!("GET {own} HTTP/1.1\r\nHost: {host}\r\nHost: evil.example\r\n\r\n"), "400"),
        (format!("POST {own} HTTP/1.1\r\nHost: {host}\r\n\r\n"), "405"),
        (format!("DELETE {own}live.json HTTP/1.1\r\nHost: {host}\r\n\r\n"), "405"),
        (format!("GET {own} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 4\r\n\r\nbody"), "400"),
        (format!("GET {own} HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n"), "400"),
        (format!("GET http://{host}{own} HTTP/1.1\r\nHost: {host}\r\n\r\n"), "400"),
        ("nonsense\r\n\r\n".to_string(), "400"),
    ];
    for (request, status) in cases {
        let answer = raw(&server, &request);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request:?}: {answer:.60}");
        assert!(!answer.contains("secret\n"), "{request:?}");
        if status == "403" {
            let body = answer.split_once("\r\n\r\n").unwrap().1;
            assert!(
                body.starts_with("this page needs its token: open the whole URL")
                    && body.lines().count() == 1
            );
            assert!(!answer.contains(own.trim_matches('/')), "{request:?}");
        }
    }
    let long = format!("GET {own} HTTP/1.1\r\nHost: {host}\r\nX: {}\r\n\r\n", "x".repeat(100_000));
    assert!(!raw(&server, &long).contains("200 OK"));
}

#[test]
fn silent_clients_hold_up_nobody_and_the_server_ends() {
    let folder = Folder::new("live-silent");
    let server = Server::start(any_port(), Shows::One(folder.0.clone())).unwrap();
    let address = server.address();
    let silent: Vec<TcpStream> = (0..8).map(|_| TcpStream::connect(address).unwrap()).collect();
    assert!(get(&server, "live.json").0.starts_with("HTTP/1.1 200"));
    let taken = Server::start(address, Shows::One(folder.0.clone())).err().unwrap().to_string();
    assert_eq!(
        taken,
        format!(
            "{address}: something is served there already: give the live page another port, or 0 for any that is free"
        )
    );
    server.stop();
    assert!(TcpStream::connect(address).is_err(), "still listening");
    drop(silent);
}
