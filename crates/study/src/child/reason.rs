//! Why a run failed, in a line: of all that it and its launcher printed, what says the reason.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use text::printable;

/// A line is cut after this many characters; the whole output lies beside the run.
const LONGEST: usize = 300;

/// What a run that failed had to say, and how it ended.
pub fn reason(stderr: &str, stdout: &str, status: ExitStatus) -> String {
    let how = ended(status);
    let said = said(stderr).or_else(|| said(&without_records(stdout)));
    said.map_or(how.clone(), |said| format!("{} ({how})", cut(&said)))
}

/// A summary or a metric is no reason.
fn without_records(stdout: &str) -> String {
    stdout.lines().filter(|line| !line.starts_with('{')).collect::<Vec<_>>().join("\n")
}

fn cut(text: &str) -> String {
    let mut cut: String = text.chars().take(LONGEST).collect();
    if cut.len() < text.len() {
        cut.push('…');
    }
    printable::line(&cut)
}

fn ended(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        // As a shell or a launcher tells of a program that a signal ended.
        (Some(code @ 129..160), _) => format!("exit code {code}: {}", signal_name(code - 128)),
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("ended by {}", signal_name(signal)),
        _ => "ended".to_string(),
    }
}

pub fn signal_name(signal: i32) -> String {
    match signal {
        libc::SIGKILL => "SIGKILL (killed, or out of memory)".to_string(),
        libc::SIGSEGV => "SIGSEGV".to_string(),
        libc::SIGABRT => "SIGABRT".to_string(),
        libc::SIGBUS => "SIGBUS".to_string(),
        libc::SIGTERM => "SIGTERM".to_string(),
        libc::SIGINT => "SIGINT".to_string(),
        other => format!("signal {other}"),
    }
}

/// From the surest to the least: our own line, what a panic said, a line that calls itself an error, the last line that stands
/// alone, what a block between rules begins with.
fn said(text: &str) -> Option<String> {
    let Output { lines, blocks } = Output::of(text);
    let own = lines.iter().rev().find_map(|line| line.strip_prefix("vitesse: "));
    let panicked = lines.iter().position(|line| line.contains("panicked at"));
    let panicked = panicked.and_then(|at| lines.get(at + 1).copied());
    let error = lines.iter().copied().find(|line| line.to_ascii_lowercase().contains("error:"));
    let alone = lines.iter().rev().copied().find(|line| !is_besides(line));
    let line = own.or(panicked).or(error).or(alone).map(str::to_string);
    line.or_else(|| blocks.into_iter().next())
}

/// What follows an error, and explains nothing.
fn is_besides(line: &str) -> bool {
    let after =
        ["note: run with `RUST_BACKTRACE", "srun: Terminat", "srun: Job step aborted", "srun: launch/slurm"];
    after.iter().any(|words| line.starts_with(words)) || line.contains("sent help message")
}

/// Lines outside of blocks, and the first paragraph of each block, as Open MPI's messages have them:
///
/// ```text
/// --------------------------------------------------------------------------
/// mpirun has detected an attempt to run as root.
///
/// Running as root is *strongly* discouraged …
/// --------------------------------------------------------------------------
/// ```
#[derive(Default)]
struct Output<'a> {
    lines: Vec<&'a str>,
    blocks: Vec<String>,
}

impl<'a> Output<'a> {
    fn of(text: &'a str) -> Self {
        let mut output = Output::default();
        let mut rest: &[&str] = &text.lines().map(str::trim).collect::<Vec<_>>();
        while let Some((line, after)) = rest.split_first() {
            let block = after.iter().position(|line| is_rule(line)).filter(|_| is_rule(line));
            match block {
                Some(end) => {
                    output.blocks.extend(beginning(&after[..end]));
                    rest = &after[end + 1..];
                }
                None => {
                    output.lines.extend(Some(*line).filter(|line| !line.is_empty() && !is_rule(line)));
                    rest = after;
                }
            }
        }
        output
    }
}

/// A line drawn of one sign.
fn is_rule(line: &str) -> bool {
    let sign = line.chars().next().filter(|c| "-=*#_~".contains(*c));
    sign.is_some_and(|sign| line.len() >= 4 && line.chars().all(|c| c == sign))
}

/// The first paragraph of a block, with the next where it announces that.
fn beginning(block: &[&str]) -> Option<String> {
    let mut paragraphs = block.split(|line| line.is_empty()).filter(|lines| !lines.is_empty());
    let first = paragraphs.next()?.join(" ");
    let next = paragraphs.next().filter(|_| first.ends_with(':'));
    Some(next.map_or(first.clone(), |next| format!("{first} {}", next.join(", "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(stderr: &str, code: i32) -> String {
        reason(stderr, "{\"steps\":1}\n", ExitStatus::from_raw(code << 8))
    }

    const RULE: &str = "--------------------------------------------------------------------------";

    /// As Open MPI 4.1 prints them.
    #[test]
    fn what_mpirun_says_is_read_from_its_blocks() {
        let block = |text: &str| format!("{RULE}\n{text}\n{RULE}\n");
        let root = "mpirun has detected an attempt to run as root.\n\nRunning as root is *strongly* discouraged as any mistake (e.g., in\n\
                    defining TMPDIR) or bug can result in catastrophic damage to the OS";
        assert_eq!(of(&block(root), 1), "mpirun has detected an attempt to run as root. (exit code 1)");
        let slots = "There are not enough slots available in the system to satisfy the 99\nslots that were requested by the \
                     application:\n\n  vitesse\n\nEither request fewer slots for your application, or make more slots\navailable for use.";
        assert_eq!(
            of(&block(slots), 1),
            "There are not enough slots available in the system to satisfy the 99 slots that were requested by the application: \
             vitesse (exit code 1)"
        );
        let missing = "mpirun was unable to launch the specified application as it could not access\nor execute an executable:\n\n\
                       Executable: /no/such/prog\nNode: vm\n\nwhile attempting to start process rank 0.";
        assert_eq!(
            of(&block(missing), 1),
            "mpirun was unable to launch the specified application as it could not access or execute an executable: \
             Executable: /no/such/prog, Node: vm (exit code 1)"
        );
        let ssh = format!(
            "ssh: Could not resolve hostname b: Name or service not known\n{}",
            block(
                "ORTE was unable to reliably start one or more daemons.\nThis usually is caused by:\n\n* not finding"
            )
        );
        assert_eq!(
            of(&ssh, 255),
            "ssh: Could not resolve hostname b: Name or service not known (exit code 255)"
        );
        let killed = block(
            "Primary job  terminated normally, but 1 process returned\na non-zero exit code. Per user-direction, the job has been aborted.",
        );
        assert!(
            of(&killed, 137).ends_with("(exit code 137: SIGKILL (killed, or out of memory))"),
            "{}",
            of(&killed, 137)
        );
        // Our own line says more than what mpirun makes of it.
        let own = format!("vitesse: rank 1: images/1.jpg: is cut off\n{killed}");
        assert_eq!(of(&own, 1), "rank 1: images/1.jpg: is cut off (exit code 1)");
        let option = "mpirun: Error: unknown option \"--bogus\"\nType 'mpirun --help' for usage.\n";
        assert_eq!(of(option, 1), "mpirun: Error: unknown option \"--bogus\" (exit code 1)");
    }

    #[test]
    fn other_launchers_and_ends() {
        let srun = "srun: error: n1: task 1: Out Of Memory\nsrun: Terminating StepId=12.0\n\
                    slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-11-16T12:00:00 ***\n\
                    srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n";
        assert_eq!(of(srun, 1), "srun: error: n1: task 1: Out Of Memory (exit code 1)");
        assert_eq!(of("sh: 1: srunn: not found\n", 127), "sh: 1: srunn: not found (exit code 127)");
        let panic = "thread 'main' panicked at src/main.rs:3:5:\nindex out of bounds\nnote: run with `RUST_BACKTRACE=1` for more\n";
        assert_eq!(of(panic, 101), "index out of bounds (exit code 101)");
        let python = "Traceback (most recent call last):\n  File \"x.py\", line 1, in <module>\nModuleNotFoundError: No module named 'torch'\n";
        assert_eq!(of(python, 1), "ModuleNotFoundError: No module named 'torch' (exit code 1)");
        let signal = |signal| reason("", "", ExitStatus::from_raw(signal));
        assert_eq!(signal(libc::SIGKILL), "ended by SIGKILL (killed, or out of memory)");
        assert_eq!(of("", 2), "exit code 2");
        // Nothing on standard error: what stands on the other.
        assert_eq!(
            reason("\n", "no such host\n{}\n", ExitStatus::from_raw(1 << 8)),
            "no such host (exit code 1)"
        );
        // A rule that nothing closes, rules alone, and what a terminal would obey.
        assert_eq!(of(&format!("{RULE}\nlost\n"), 1), "lost (exit code 1)");
        assert_eq!(of(&format!("{RULE}\n{RULE}\n====\n"), 1), "exit code 1");
        assert_eq!(of("vitesse: \u{1b}[2Jx\n", 1), "\\u001b[2Jx (exit code 1)");
        assert!(of(&"x".repeat(10_000), 1).len() < 400);
    }
}
