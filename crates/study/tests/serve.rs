//! The live page's server: what it answers, what it refuses, and that it ends.

use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use study::grid::Planned;
use study::results::{FORMAT, Point, Results};
use study::sample;
use study::serve::{Clock, Server};
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
fn start(folder: &std::path::Path) -> (Server, Arc<Told>) {
    let clock = Arc::new(Told::default());
    (Server::start_by(any_port(), folder, clock.clone()).unwrap(), clock)
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

fn get(server: &Server, path: &str) -> (String, String) {
    let request = format!("GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n", server.address());
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
    serde_json::from_str(&get(server, "/live.json").1).unwrap()
}

fn step(step: u64, loss: f64) -> String {
    format!(
        "{{\"step\":{step},\"epoch\":1,\"loss\":{loss},\"lr\":0.001,\"images_per_second\":700.0,\"top1\":0.3,\"seconds\":0.1,\
         \"compute_seconds\":0.08,\"exchange_seconds\":0.01,\"wait_seconds\":0.0,\"data_seconds\":0.005,\"optimizer_seconds\":0.004,\
         \"idle_seconds\":0.001,\"hidden_exchange_seconds\":0.0}}\n"
    )
}

#[test]
fn a_run_is_seen_as_it_goes_on() {
    let folder = Folder::new("live-run");
    let server = start(&folder.0.join("later"));
    assert_eq!(live(&server)["state"], "no step is written yet");
    fs::create_dir_all(folder.0.join("later")).unwrap();
    let config = "{\"model\":\"vit-<nano>\",\"steps\":200,\"epochs\":2,\"world\":2}";
    fs::write(folder.0.join("later/config.json"), config).unwrap();
    let metrics = folder.0.join("later/metrics.jsonl");
    let first: String = (0..50).map(|i| step(i, 2.0 - 0.01 * i as f64)).collect();
    fs::write(&metrics, format!("{first}{}", "{\"step\":50,\"ep")).unwrap();
    let seen = live(&server);
    assert_eq!(seen["state"], "epoch 1 of 2 · step 50 of 200");
    assert_eq!(seen["share"], 0.25);
    let figures = seen["sections"]["figures"].as_str().unwrap();
    for id in ["loss", "accuracy", "rate", "ranks"] {
        assert!(figures.contains(&format!("<figure id=\"{id}\">")), "{id}");
    }
    assert!(figures.contains("compute: 80.0 ms (80%)"), "the account of time");
    assert!(
        seen["sections"]["log"]
            .as_str()
            .unwrap()
            .contains("epoch 1 · step 49 · loss 1.5100 · lr 1.00e-3 · 700 images/s")
    );
    // An evaluation, and the ranks one by one.
    let text = fs::read_to_string(&metrics).unwrap().replace("{\"step\":50,\"ep", "");
    let more =
        format!("{text}{}{{\"step\":50,\"epoch\":2,\"eval_loss\":1.4,\"eval_top1\":0.5}}\n", step(50, 1.5));
    fs::write(&metrics, more).unwrap();
    let rank = |rank: u32| {
        format!(
            "{{\"step\":50,\"rank\":{rank},\"seconds\":0.1,\"compute\":0.05,\"exchange\":0.05,\"wait\":0,\"data\":0,\"optimizer\":0,\"idle\":0,\"hidden_exchange\":0}}\n"
        )
    };
    fs::write(folder.0.join("later/ranks.jsonl"), rank(0) + &rank(1)).unwrap();
    let seen = live(&server);
    let figures = seen["sections"]["figures"].as_str().unwrap();
    assert!(figures.contains(">validation</text>") && figures.contains(">rank 1</text>"));
    assert_eq!(seen["about"], "vit-<nano> · 2 ranks");
    assert!(seen["sections"]["log"].as_str().unwrap().contains("validation: loss 1.4000 · top-1 50.00%"));
    // A run that went back to a checkpoint is read anew.
    fs::write(&metrics, step(0, 9.0)).unwrap();
    assert_eq!(live(&server)["state"], "epoch 1 of 2 · step 1 of 200");
    server.0.stop();
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
    let drawn = |step: u32| format!("\"epoch 1 of 1 · step {step} of {step}\"");
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
    assert_eq!((&seen["state"], &seen["share"]), (&json!("0 of 21 runs done"), &json!(0.0)));
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
    assert_eq!(seen["state"], "14 of 21 runs done · 1 file that can't be read");
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

#[test]
fn only_known_paths_and_own_names_are_answered() {
    let folder = Folder::new("live-refusals");
    fs::write(folder.0.join("secret.txt"), "secret").unwrap();
    let server = Server::start(any_port(), &folder.0).unwrap();
    let host = server.address();
    let (head, body) = get(&server, "/");
    assert!(
        head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("X-Content-Type-Options: nosniff"),
        "{head}"
    );
    assert!(body.contains("connect-src 'self'") && body.contains("default-src 'none'"));
    assert!(!head.to_lowercase().contains("access-control"), "{head}");
    let cases = [
        (format!("GET /secret.txt HTTP/1.1\r\nHost: {host}\r\n\r\n"), "404"),
        (format!("GET /../../etc/passwd HTTP/1.1\r\nHost: {host}\r\n\r\n"), "404"),
        (format!("GET /%2e%2e/secret.txt HTTP/1.1\r\nHost: {host}\r\n\r\n"), "404"),
        (format!("GET /live.json?x HTTP/1.1\r\nHost: {host}\r\n\r\n"), "404"),
        (format!("GET / HTTP/1.1\r\nHost: evil.example:{}\r\n\r\n", host.port()), "403"),
        ("GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n".to_string(), "403"),
        ("GET / HTTP/1.1\r\n\r\n".to_string(), "400"),
        (format!("GET / HTTP/1.1\r\nHost: {host}\r\nHost: evil.example\r\n\r\n"), "400"),
        (format!("POST / HTTP/1.1\r\nHost: {host}\r\n\r\n"), "405"),
        (format!("DELETE /live.json HTTP/1.1\r\nHost: {host}\r\n\r\n"), "405"),
        (format!("GET / HTTP/1.1\r\nHost: {host}\r\nContent-Length: 4\r\n\r\nbody"), "400"),
        (format!("GET / HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n"), "400"),
        (format!("GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\n\r\n"), "400"),
        ("nonsense\r\n\r\n".to_string(), "400"),
    ];
    for (request, status) in cases {
        let answer = raw(&server, &request);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request:?}: {answer:.60}");
        assert!(!answer.contains("secret\n"), "{request:?}");
    }
    let long = format!("GET / HTTP/1.1\r\nHost: {host}\r\nX: {}\r\n\r\n", "x".repeat(100_000));
    assert!(!raw(&server, &long).contains("200 OK"));
}

#[test]
fn silent_clients_hold_up_nobody_and_the_server_ends() {
    let folder = Folder::new("live-silent");
    let server = Server::start(any_port(), &folder.0).unwrap();
    let address = server.address();
    let silent: Vec<TcpStream> = (0..8).map(|_| TcpStream::connect(address).unwrap()).collect();
    assert!(get(&server, "/live.json").0.starts_with("HTTP/1.1 200"));
    assert!(
        Server::start(address, &folder.0)
            .is_err_and(|error| error.to_string().contains("needs another address"))
    );
    server.stop();
    assert!(TcpStream::connect(address).is_err(), "still listening");
    drop(silent);
}
