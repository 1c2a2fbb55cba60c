//! Reads the command line of a run that was recorded before settings were: words of `vitesse train` that its parser accepted then.

use super::value::Form;
use super::{Raw, find};
use crate::deepspeed::{DeepSpeed, FileError};
use std::path::Path;

/// Reads what was typed in `folder`, with the DeepSpeed file read; `place` is the record's name in messages.
pub fn read(command: &[String], folder: &Path, place: &str) -> Result<Raw, FileError> {
    let refused = |why: String| {
        let why = format!("the command of the run can't be read: {why}");
        FileError::File { file: place.to_string(), why }
    };
    let Some(start) = command.iter().position(|word| word == "train") else {
        return Err(refused("the run was not started by `vitesse train`".to_string()));
    };
    let mut raw = Raw::default();
    let mut words = command[start + 1..].iter().peekable();
    while let Some(word) = words.next() {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value.to_string())),
            None => (word.as_str(), None),
        };
        let setting = name.strip_prefix("--").and_then(find);
        let setting = setting.ok_or_else(|| refused(format!("unexpected argument '{word}' found")))?;
        let mut next = || words.next_if(|word| setting.form != Form::Perhaps || !word.starts_with('-'));
        let value = match setting.form {
            Form::Switch => Some(String::new()),
            Form::Perhaps => Some(value.or_else(|| next().cloned()).unwrap_or_default()),
            Form::One | Form::List => value.or_else(|| next().cloned()),
        };
        let value = value.ok_or_else(|| refused(format!("{name} has no value")))?;
        setting.put(&mut raw, &value).map_err(|why| refused(format!("{name} {value}: {why}")))?;
    }
    raw.deepspeed = raw.config.as_ref().map(|path| DeepSpeed::read(&folder.join(path))).transpose()?;
    Ok(raw.within(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_of_before_says_what_it_said() {
        let line = "/usr/bin/vitesse train --model=vit-ti/4 --lr 1e-3 --mean 0.1,0.2,0.3 --balance --resume --iterations 7 \
                    --lr-scale head=10 --lr-scale *.bias=2 --data folder:photos --resume=runs/a --serve --out a=b";
        let words: Vec<String> = line.split_whitespace().map(String::from).collect();
        let raw = read(&words, Path::new("/home"), "run.json").unwrap();
        let expected = Raw {
            model: Some("vit-ti/4".into()),
            lr: Some(1e-3),
            mean: vec![0.1, 0.2, 0.3],
            balance: true,
            steps: Some(7),
            lr_scale: vec!["head=10".parse().unwrap(), "*.bias=2".parse().unwrap()],
            data: Some("folder:/home/photos".into()),
            resume: Some(Some("runs/a".into())),
            serve: Some(None),
            out: Some("a=b".into()),
            ..Raw::default()
        };
        assert_eq!(raw, expected);
    }

    #[test]
    fn what_cannot_be_read_is_said_with_its_file() {
        let refused = |line: &str| {
            let words: Vec<String> = line.split(' ').map(String::from).collect();
            read(&words, Path::new(""), "run.json").unwrap_err().to_string()
        };
        assert_eq!(
            refused("vitesse train --modle x"),
            "run.json: the command of the run can't be read: unexpected argument '--modle' found"
        );
        assert!(refused("vitesse train --lr x").ends_with("--lr x: is no number"));
        assert!(refused("vitesse train --lr").ends_with("--lr has no value"));
        assert!(refused("vitesse study").ends_with("the run was not started by `vitesse train`"));
    }
}
