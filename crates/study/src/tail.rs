//! Files that grow by lines while they are read.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Reads on where it stopped. A file that became shorter (a run that went back to a checkpoint) is read again from its start.
pub struct Follower {
    path: PathBuf,
    read: u64,
}

/// A look reads at most this much, so that no answer takes long.
const PIECE: u64 = 16 << 20;

impl Follower {
    pub fn new(path: PathBuf) -> Follower {
        Follower { path, read: 0 }
    }

    /// Calls `each` with every whole line since the last time; `again` first, if all is read anew. What can't be read now may be
    /// readable at the next look.
    pub fn follow(&mut self, again: &mut dyn FnMut(), each: &mut dyn FnMut(&str)) {
        let Ok(mut file) = File::open(&self.path) else { return };
        let length = file.metadata().map_or(0, |data| data.len());
        if length < self.read {
            self.read = 0;
        }
        if self.read == 0 {
            again();
        }
        if file.seek(SeekFrom::Start(self.read)).is_err() {
            return;
        }
        let mut reader = BufReader::new(file.take(PIECE));
        let mut line = vec![];
        loop {
            line.clear();
            match reader.read_until(b'\n', &mut line) {
                // A line that is still being written is for the next time.
                Ok(n) if n > 0 && line.ends_with(b"\n") => {
                    self.read += n as u64;
                    each(String::from_utf8_lossy(&line).trim_end());
                }
                _ => return,
            }
        }
    }
}

/// The whole lines among the last bytes of a file.
pub fn last_lines(path: &Path, bytes: u64) -> Vec<String> {
    let read = || -> std::io::Result<(Vec<u8>, bool)> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        let from = length.saturating_sub(bytes);
        file.seek(SeekFrom::Start(from))?;
        let mut text = vec![];
        file.take(bytes).read_to_end(&mut text)?;
        Ok((text, from > 0))
    };
    let Ok((text, cut)) = read() else { return vec![] };
    let text = String::from_utf8_lossy(&text);
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().skip(usize::from(cut)).map(str::to_string).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn lines_come_once_and_whole() {
        let folder = ::testing::Folder::new("tail");
        let path = folder.join("lines");
        let mut follower = Follower::new(path.clone());
        let look = |follower: &mut Follower| {
            let (mut seen, mut anew) = (vec![], 0);
            follower.follow(&mut || anew += 1, &mut |line| seen.push(line.to_string()));
            (seen.join(","), anew)
        };
        assert_eq!(look(&mut follower), (String::new(), 0));
        let mut file = File::create(&path).unwrap();
        write!(file, "a\nb\nhal").unwrap();
        assert_eq!(look(&mut follower), ("a,b".into(), 1));
        assert_eq!(last_lines(&path, 5), Vec::<String>::new());
        assert_eq!(last_lines(&path, 6), ["b"]);
        assert_eq!(last_lines(&path, 600), ["a", "b"]);
        writeln!(file, "f").unwrap();
        assert_eq!(look(&mut follower), ("half".into(), 0));
        std::fs::write(&path, "c\n").unwrap();
        assert_eq!(look(&mut follower), ("c".into(), 1));
    }
}
