use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::JoinHandle;

use super::*;
use testing::Folder;

/// What the server does with one connection.
#[derive(Clone, Copy)]
enum Answer {
    /// All that was asked for.
    Good,
    /// So many bytes of what was asked for.
    Broken(usize),
    /// The whole body, whatever range was asked for.
    Whole,
    /// So many bytes of the whole body, whatever range was asked for.
    WholeBroken(usize),
    Status(&'static str),
    /// To another address, as mirrors do.
    Redirect,
    /// A range that was not asked for.
    OtherRange,
    /// Nothing, until the other side gives up.
    Silence,
    /// So many bytes of the whole body, then nothing.
    Stalled(usize),
}

/// A server on this machine that answers one connection after another, then closes.
struct Server {
    url: String,
    requests: JoinHandle<Vec<String>>,
}

impl Server {
    fn new(body: Vec<u8>, answers: Vec<Answer>) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/sets", listener.local_addr().unwrap());
        let requests = std::thread::spawn(move || {
            answers.into_iter().map(|answer| respond(listener.accept().unwrap().0, &body, answer)).collect()
        });
        Server { url, requests }
    }

    /// What was asked for: path and range.
    fn requests(self) -> Vec<String> {
        self.requests.join().unwrap()
    }
}

fn respond(mut stream: TcpStream, body: &[u8], answer: Answer) -> String {
    let lines: Vec<String> = BufReader::new(stream.try_clone().unwrap())
        .lines()
        .map(Result::unwrap)
        .take_while(|line| !line.is_empty())
        .collect();
    let path = lines[0].split(' ').nth(1).unwrap().to_string();
    let range =
        lines.iter().find_map(|line| line.to_lowercase().strip_prefix("range: bytes=").map(str::to_string));
    let begin: usize = range.as_ref().map_or(0, |range| range.trim_end_matches('-').parse().unwrap());
    let (head, sent) = match answer {
        Answer::Status(status) => (format!("{status}\r\ncontent-length: 0"), &body[..0]),
        Answer::Redirect => (format!("302 Found\r\nlocation: /other{path}\r\ncontent-length: 0"), &body[..0]),
        Answer::OtherRange => partial(body, begin + 1, usize::MAX),
        Answer::Silence => (String::new(), &body[..0]),
        Answer::Whole | Answer::WholeBroken(_) | Answer::Stalled(_) => whole(body, answer),
        Answer::Good | Answer::Broken(_) if begin == 0 => whole(body, answer),
        Answer::Good => partial(body, begin, usize::MAX),
        Answer::Broken(count) => partial(body, begin, count),
    };
    // Whoever has seen enough closes; that is no error here.
    if !head.is_empty() {
        let head = format!("HTTP/1.1 {head}\r\nconnection: close\r\n\r\n");
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(sent));
    }
    if matches!(answer, Answer::Silence | Answer::Stalled(_)) {
        let _ = stream.read(&mut [0]);
    }
    range.map_or(path.clone(), |range| format!("{path} {range}"))
}

fn whole(body: &[u8], answer: Answer) -> (String, &[u8]) {
    let count = match answer {
        Answer::Broken(count) | Answer::WholeBroken(count) | Answer::Stalled(count) => count,
        _ => body.len(),
    };
    (format!("200 OK\r\ncontent-length: {}", body.len()), &body[..count])
}

fn partial(body: &[u8], begin: usize, count: usize) -> (String, &[u8]) {
    let rest = &body[begin..];
    let range = format!("bytes {begin}-{}/{}", body.len() - 1, body.len());
    let head = format!("206 Partial Content\r\ncontent-range: {range}\r\ncontent-length: {}", rest.len());
    (head, &rest[..count.min(rest.len())])
}

trait Contents {
    fn files(&self) -> Vec<String>;
    fn part(&self) -> PathBuf;
}

impl Contents for Folder {
    fn files(&self) -> Vec<String> {
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut names: Vec<_> = fs::read_dir(&self.0).unwrap().map(name).collect();
        names.sort();
        names
    }

    fn part(&self) -> PathBuf {
        self.0.join("set.tar.gz.part")
    }
}

fn body() -> Vec<u8> {
    (0..300_000u32).map(|i| (i.wrapping_mul(i) >> 7) as u8).collect()
}

const MD5: &str = "80681a347dd84e045afa0fe1f9efe49e";
const IMPATIENT: Patience = Patience {
    attempts: 3,
    pause: Duration::from_millis(1),
    connect: Duration::from_secs(5),
    silence: Duration::from_millis(200),
};

/// Downloads `body` from a server that gives these answers; the result with `FOLDER` and `URL` for what changes.
fn download(folder: &Folder, md5: &str, answers: &[Answer]) -> (Result<PathBuf, String>, Vec<String>) {
    let server = Server::new(body(), answers.to_vec());
    let archive = Archive { name: "set.tar.gz", base_url: &server.url, md5, bytes: body().len() as u64 };
    let mut reports = Vec::new();
    let result = fetch(archive, &folder.0, IMPATIENT, &mut |done, total| reports.push((done, total)));
    assert!(reports.iter().all(|&(done, total)| done <= 300_000 && total == Some(300_000)));
    let anonymous = |error: DataError| {
        error.to_string().replace(&*folder.0.to_string_lossy(), "FOLDER").replace(&server.url, "URL")
    };
    (result.map_err(anonymous), server.requests())
}

/// The downloads that end well: they leave the archive, whole, and nothing else.
fn succeeds(test: &str, left_from_before: &[u8], answers: &[Answer], requests: &[&str]) {
    let folder = Folder::new(test);
    if !left_from_before.is_empty() {
        fs::write(folder.part(), left_from_before).unwrap();
    }
    let (path, asked) = download(&folder, MD5, answers);
    let path = path.unwrap();
    assert_eq!(fs::read(path).unwrap(), body());
    assert_eq!(folder.files(), ["set.tar.gz"]);
    let asked: Vec<_> = asked.iter().map(|path| path.replace("/sets/set.tar.gz", "SET")).collect();
    assert_eq!(asked, requests);
    let again = download(&folder, MD5, &[]);
    assert_eq!(again.0.unwrap(), folder.0.join("set.tar.gz"), "it is not asked for again");
}

#[test]
fn a_whole_answer() {
    succeeds("whole", b"", &[Answer::Good], &["SET"]);
}

#[test]
fn broken_connections_are_continued() {
    let answers = [Answer::Broken(100_000), Answer::Broken(0), Answer::Broken(1), Answer::Good];
    succeeds("broken", b"", &answers, &["SET", "SET 100000-", "SET 100000-", "SET 100001-"]);
}

#[test]
fn an_earlier_run_is_continued() {
    succeeds("earlier", &body()[..299_999], &[Answer::Good], &["SET 299999-"]);
    succeeds("complete", &body(), &[], &[]);
}

#[test]
fn a_server_without_ranges_starts_over() {
    succeeds("whole-again", &body()[..5], &[Answer::Whole], &["SET 5-"]);
    let unsatisfiable = Answer::Status("416 Range Not Satisfiable");
    succeeds("unsatisfiable", &body()[..5], &[unsatisfiable, Answer::Good], &["SET 5-", "SET"]);
    succeeds("other-range", &body()[..5], &[Answer::OtherRange, Answer::Good], &["SET 5-", "SET"]);
    succeeds("too-long", &[0; 300_001], &[Answer::Good], &["SET"]);
}

#[test]
fn redirects_keep_the_range() {
    let asked = ["SET 7-", "/otherSET 7-"];
    succeeds("redirect", &body()[..7], &[Answer::Redirect, Answer::Good], &asked);
}

#[test]
fn busy_and_silent_servers_are_asked_again() {
    let answers =
        [Answer::Status("503 Service Unavailable"), Answer::Silence, Answer::Stalled(9), Answer::Good];
    succeeds("busy", b"", &answers, &["SET", "SET", "SET", "SET 9-"]);
}

#[test]
fn a_wrong_sum_is_told_and_leaves_nothing() {
    let folder = Folder::new("get-sum");
    let other = "00000000000000000000000000000000";
    let error = download(&folder, other, &[Answer::Good]).0.unwrap_err();
    let told = "what was downloaded is not the published archive: its MD5 is";
    assert_eq!(error, format!("FOLDER/set.tar.gz: {told} {MD5}, not {other}"));
    assert_eq!(folder.files(), [""; 0]);
}

#[test]
fn a_missing_archive_is_told() {
    let folder = Folder::new("get-missing");
    let error = download(&folder, MD5, &[Answer::Status("404 Not Found")]).0.unwrap_err();
    let url = "URL/set.tar.gz";
    assert_eq!(error, format!("FOLDER/set.tar.gz: cannot download {url}: the server answered 404 Not Found"));
    assert_eq!(folder.files(), [""; 0]);
}

#[test]
fn patience_ends_and_what_there_is_stays() {
    let folder = Folder::new("get-patience");
    let cut = Answer::WholeBroken(1000);
    let error = download(&folder, MD5, &[cut, cut, cut]).0.unwrap_err();
    assert!(error.starts_with("FOLDER/set.tar.gz: cannot download URL/set.tar.gz: "), "{error}");
    assert!(error.ends_with("(3 attempts; 1000 bytes are kept for the next run)"), "{error}");
    assert_eq!(folder.files(), ["set.tar.gz.part"]);
    assert_eq!(fs::read(folder.part()).unwrap(), body()[..1000]);
}

#[test]
fn another_archive_of_that_name_stays() {
    let folder = Folder::new("get-another");
    fs::write(folder.0.join("set.tar.gz"), b"mine").unwrap();
    let error = download(&folder, MD5, &[]).0.unwrap_err();
    assert_eq!(
        error,
        "FOLDER/set.tar.gz: it is not the published archive: it has 4 bytes, not 300000; move it away"
    );
    let sized = Archive { name: "set.tar.gz", base_url: "", md5: MD5, bytes: 4 };
    let error = fetch(sized, &folder.0, IMPATIENT, &mut |_, _| ()).unwrap_err().to_string();
    assert!(
        error.ends_with(&format!("its MD5 is 918b81db5e91d031548b963c93845e5b, not {MD5}; move it away")),
        "{error}"
    );
    assert_eq!(fs::read(folder.0.join("set.tar.gz")).unwrap(), b"mine");
}

#[test]
fn a_server_with_something_else_is_told_before_it_is_stored() {
    let folder = Folder::new("get-size");
    let server = Server::new(body(), vec![Answer::Good]);
    let archive = Archive { name: "set.tar.gz", base_url: &server.url, md5: MD5, bytes: 300_001 };
    let error = fetch(archive, &folder.0, IMPATIENT, &mut |_, _| ()).unwrap_err().to_string();
    assert!(error.ends_with("the server has 300000 bytes of it, the archive 300001"), "{error}");
    assert_eq!(folder.files(), [""; 0]);
}

#[test]
fn two_downloads_do_not_mix() {
    let folder = Folder::new("get-lock");
    let held = open_part(&folder.part()).unwrap();
    let error = download(&folder, MD5, &[]).0.unwrap_err();
    assert_eq!(error, "FOLDER/set.tar.gz.part: another download of this archive is under way");
    drop(held);
    let nowhere = Archive { name: "set.tar.gz", base_url: "http://127.0.0.1:1", md5: MD5, bytes: 1 };
    let error = fetch(nowhere, &folder.0, IMPATIENT, &mut |_, _| ()).unwrap_err().to_string();
    assert!(error.contains("Connection refused (os error 111) (3 attempts; 0 bytes are kept"), "{error}");
    let no_url = Archive { base_url: "not a url", ..nowhere };
    assert!(fetch(no_url, &folder.0, IMPATIENT, &mut |_, _| ()).is_err());
}
