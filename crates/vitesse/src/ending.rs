//! Files that are written by the ending of their name.

use std::path::Path;

/// Refuses a name that ends in none of several endings.
pub fn endings(what: &str, path: Option<&Path>, known: &[&str]) -> anyhow::Result<()> {
    let is = |path: &Path| {
        path.extension().is_some_and(|found| known.iter().any(|end| found.eq_ignore_ascii_case(end)))
    };
    match path.filter(|path| !is(path) || path.as_os_str().as_encoded_bytes().ends_with(b"/")) {
        None => Ok(()),
        Some(path) => {
            let (path, known) = (path.display(), known.join(", ."));
            anyhow::bail!("{what}{path}: give the file a name that ends in one of .{known}")
        }
    }
}

/// Refuses a name with another ending than what is written has. `what`: the flag, or the file's place on the command line.
pub fn ending(what: &str, path: Option<&Path>, ending: &str) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    // A path takes no notice of a slash at its end, but it names a folder.
    let folder = path.as_os_str().as_encoded_bytes().ends_with(b"/");
    if !folder && path.extension().is_some_and(|found| found.eq_ignore_ascii_case(ending)) {
        return Ok(());
    }
    let written = match ending {
        "safetensors" if what.is_empty() => {
            anyhow::bail!(
                "{}: weights are written as safetensors, or with their model as ONNX: give the file a name that ends in .safetensors \
                 or .onnx",
                path.display()
            )
        }
        "safetensors" => "logits are written as safetensors",
        _ => "pictures are written as PNG",
    };
    anyhow::bail!("{what}{}: {written}: give the file a name that ends in .{ending}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_named_for_what_is_in_it() {
        let refused = |path: &str| ending("--grid ", Some(Path::new(path)), "png").unwrap_err().to_string();
        assert!(ending("--grid ", None, "png").is_ok());
        for good in ["a.png", "b/a.PNG", "a.jpg.png"] {
            assert!(ending("", Some(Path::new(good)), "png").is_ok(), "{good}");
        }
        let text = "--grid a.jpg: pictures are written as PNG: give the file a name that ends in .png";
        assert_eq!(refused("a.jpg"), text);
        for bad in ["a", "png", ".png", "a.png/", "a.png.jpg", ""] {
            let error = refused(bad);
            assert!(error.contains("ends in .png"), "{error}");
        }
    }
}
