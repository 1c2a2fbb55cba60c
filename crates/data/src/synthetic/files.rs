//! Writes a set as image files, in the layout that [`crate::folder`] or [`crate::segment::masks`] reads.

use crate::drawing;
use crate::segment::overlay::save_mask;
use crate::{DataError, Dataset, Sample, Task};
use std::fs;
use std::path::Path;

/// Writes every image as PNG below `folder`: into a folder for each class, or into `images/` and `masks/`. Refuses to replace a file.
pub fn write(set: &dyn Dataset, folder: &Path) -> Result<(), DataError> {
    let make = |path: &Path| fs::create_dir_all(path).map_err(|error| DataError::file(path, error));
    let (images, masks) = (folder.join("images"), folder.join("masks"));
    let by_class = |index: usize| folder.join(&set.class_names()[set.label(index)]);
    if set.task() == Task::Segment {
        make(&images)?;
        make(&masks)?;
    }
    let mut sample = Sample::default();
    for index in 0..set.len() {
        set.read(index, &mut sample)?;
        let name = format!("{index:06}.png");
        if set.task() == Task::Segment {
            drawing::save(&sample.image, &images.join(&name))?;
            save_mask(&sample.mask, sample.size(), &masks.join(&name))?;
        } else {
            let class = by_class(index);
            make(&class)?;
            drawing::save(&sample.image, &class.join(&name))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::{Entry, Open, Place, Reading};
    use crate::{Split, SyntheticSpec};
    use testing::Folder;

    /// What was written is read as the set that it was written from.
    #[test]
    fn files_hold_the_set() {
        for (task, reader) in [(Task::Classify, "folder"), (Task::Segment, "masks")] {
            let folder = Folder::new("synthetic-files");
            let spec =
                |split| SyntheticSpec { split, len: 12, image_size: 16, channels: 3, classes: 3, seed: 1 };
            let Open::Synthetic(open) = Entry::synthetic(task).open else {
                panic!("{task:?} has no synthetic set")
            };
            let sets = [Split::Train, Split::Test].map(|split| open(spec(split)).unwrap());
            for (set, part) in sets.iter().zip(["train", "val"]) {
                write(&**set, &folder.join(part)).unwrap();
            }
            fs::write(folder.join("classes.txt"), sets[0].class_names().join("\n")).unwrap();
            let entry = Entry::named(reader).unwrap();
            assert_eq!(entry.place, Some(Place::Folder));
            let Open::Path(open) = entry.open else { panic!("{reader} has no path") };
            let reading = Reading { split: Split::Test, channels: 3, skip_bad: false };
            let read = open(&folder.0, reading).unwrap();
            assert_eq!(read.len(), 12);
            let (mut found, mut written) = (vec![], vec![]);
            for (set, all) in [(&read, &mut found), (&sets[1], &mut written)] {
                for index in 0..set.len() {
                    let mut sample = Sample::default();
                    set.read(index, &mut sample).unwrap();
                    all.push((set.class_names()[set.label(index)].clone(), sample.image.pixels, sample.mask));
                }
                all.sort();
            }
            assert!(found == written, "{task:?}: other pixels");
        }
    }
}
