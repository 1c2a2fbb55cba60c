//! Scores of segmentation: IoU and accuracy, from a confusion matrix of pixels.
//!
//! Everything is made of counts of (true class, predicted class) over all pixels that are not ignored. Counts are whole
//! numbers that add, so ranks sum theirs, in any order, and come to the scores that one rank would have.

use data::segment::IGNORED;
use serde::Serialize;

/// Counts of (true class, predicted class), row by row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PixelConfusion {
    classes: usize,
    counts: Vec<u64>,
}

/// Scores of one class. `None`: there is nothing to take a share of.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ClassScore {
    /// Intersection over union of the class's pixels and those predicted as it. `None` for a class that occurs
    /// neither in the truth nor in the predictions.
    pub iou: Option<f64>,
    /// Recall: the share of the class's pixels that were predicted as it. `None` for a class that doesn't occur in the truth.
    pub accuracy: Option<f64>,
    /// Pixels of the class.
    pub pixels: u64,
}

/// Over all classes. 0 where nothing was counted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Scores {
    /// The mean over the classes that have an IoU: one that occurs neither in the truth nor in the predictions is left
    /// out, one that is only predicted counts as 0. This is mmsegmentation's mIoU.
    pub mean_iou: f64,
    /// Share of all pixels whose class was predicted.
    pub pixel_accuracy: f64,
    /// The mean over the classes that occur in the truth.
    pub mean_accuracy: f64,
    pub pixels: u64,
}

/// What an evaluation came to, over all ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PixelScore {
    /// Mean over the pixels that a model read.
    pub loss: f64,
    pub images: u64,
    pub confusion: PixelConfusion,
}

/// Pixels or labels that can't be counted.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CountError {
    #[error("{labels} labels and {predicted} predictions: each pixel has one of both")]
    Lengths { labels: usize, predicted: usize },
    #[error("class {found} was counted where there are {classes} classes")]
    Class { found: u8, classes: usize },
}

impl PixelConfusion {
    pub fn new(classes: usize) -> Self {
        PixelConfusion { classes, counts: vec![0; classes * classes] }
    }

    /// Counts the pixels of an image; those whose label is ignored are left out, whatever was predicted. Counts nothing if
    /// something is wrong.
    pub fn add(&mut self, labels: &[u8], predicted: &[u8]) -> Result<(), CountError> {
        if labels.len() != predicted.len() {
            return Err(CountError::Lengths { labels: labels.len(), predicted: predicted.len() });
        }
        // Counted by byte first: no branch for every pixel, and nothing is added before all is known to be good.
        let mut seen = vec![0u64; 256 * 256];
        for (&label, &predicted) in labels.iter().zip(predicted) {
            seen[usize::from(label) << 8 | usize::from(predicted)] += 1;
        }
        let ignored = usize::from(IGNORED);
        let pairs = || seen.iter().enumerate().filter(|(pair, count)| **count > 0 && pair >> 8 != ignored);
        for (pair, _) in pairs() {
            let largest = (pair >> 8).max(pair & 255);
            if largest >= self.classes {
                return Err(CountError::Class { found: largest as u8, classes: self.classes });
            }
        }
        for (pair, count) in pairs() {
            self.counts[(pair >> 8) * self.classes + (pair & 255)] += count;
        }
        Ok(())
    }

    /// All counts, for ranks to sum.
    pub fn counts_mut(&mut self) -> &mut [u64] {
        &mut self.counts
    }

    pub fn count(&self, label: usize, predicted: usize) -> u64 {
        self.counts[label * self.classes + predicted]
    }

    pub fn class(&self, class: usize) -> ClassScore {
        let hits = self.count(class, class);
        let pixels: u64 = (0..self.classes).map(|predicted| self.count(class, predicted)).sum();
        let taken: u64 = (0..self.classes).map(|label| self.count(label, class)).sum();
        let share = |of: u64| (of > 0).then(|| hits as f64 / of as f64);
        ClassScore { iou: share(pixels + taken - hits), accuracy: share(pixels), pixels }
    }

    /// Of every class, in the order of the labels.
    pub fn by_class(&self) -> Vec<ClassScore> {
        (0..self.classes).map(|class| self.class(class)).collect()
    }

    pub fn scores(&self) -> Scores {
        let by_class = self.by_class();
        let mean = |of: fn(&ClassScore) -> Option<f64>| {
            let there: Vec<f64> = by_class.iter().filter_map(of).collect();
            there.iter().sum::<f64>() / there.len().max(1) as f64
        };
        let hits: u64 = (0..self.classes).map(|class| self.count(class, class)).sum();
        let pixels: u64 = self.counts.iter().sum();
        Scores {
            mean_iou: mean(|score| score.iou),
            pixel_accuracy: hits as f64 / pixels.max(1) as f64,
            mean_accuracy: mean(|score| score.accuracy),
            pixels,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers without structure.
    fn hash(i: u64) -> u64 {
        let x = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32
    }

    /// The formula that the fixture's numbers were made by, too: see below.
    fn pixels(count: u64, classes: u64) -> (Vec<u8>, Vec<u8>) {
        let label = |i: u64| {
            let h = hash(i);
            if h.is_multiple_of(11) { IGNORED } else { (h % 97 % classes) as u8 }
        };
        let predicted = |i: u64| {
            let (h, label) = (hash(i + 1_000_000), label(i));
            if h % 3 > 0 && label != IGNORED { label } else { (h % 89 % classes) as u8 }
        };
        ((0..count).map(label).collect(), (0..count).map(predicted).collect())
    }

    fn counted(classes: usize, labels: &[u8], predicted: &[u8]) -> PixelConfusion {
        let mut confusion = PixelConfusion::new(classes);
        confusion.add(labels, predicted).unwrap();
        confusion
    }

    /// Sets of pixels, class by class, without a matrix.
    fn slowly(classes: u8, labels: &[u8], predicted: &[u8]) -> Vec<(Option<f64>, Option<f64>)> {
        let kept: Vec<(u8, u8)> =
            labels.iter().copied().zip(predicted.iter().copied()).filter(|(l, _)| *l != IGNORED).collect();
        let number = |of: &dyn Fn(u8, u8) -> bool| kept.iter().filter(|(l, p)| of(*l, *p)).count() as f64;
        let share = |part: f64, of: f64| if of > 0.0 { Some(part / of) } else { None };
        (0..classes)
            .map(|class| {
                let both = number(&|l, p| l == class && p == class);
                let either = number(&|l, p| l == class || p == class);
                (share(both, either), share(both, number(&|l, _| l == class)))
            })
            .collect()
    }

    #[test]
    fn scores_equal_those_of_a_slow_count() {
        // Of 120 classes 97 at most occur.
        for (count, classes) in [(1, 2), (500, 5), (3000, 120)] {
            let (labels, predicted) = pixels(count, classes);
            let confusion = counted(classes as usize, &labels, &predicted);
            let slow = slowly(classes as u8, &labels, &predicted);
            let found: Vec<_> = confusion.by_class().iter().map(|s| (s.iou, s.accuracy)).collect();
            assert_eq!(found, slow);
            let mean = |of: Vec<f64>| of.iter().sum::<f64>() / of.len().max(1) as f64;
            let scores = confusion.scores();
            assert_eq!(scores.mean_iou, mean(slow.iter().filter_map(|s| s.0).collect()));
            assert_eq!(scores.mean_accuracy, mean(slow.iter().filter_map(|s| s.1).collect()));
        }
    }

    /// By numpy, from the same formula, the way mmsegmentation does it (`histogram` of intersections and areas, `nanmean`):
    ///
    /// ```python
    /// M = (1 << 64) - 1
    /// def hash(i):
    ///     x = (i + 1) * 0x9e3779b97f4a7c15 & M
    ///     return ((x ^ x >> 29) * 0xbf58476d1ce4e5b9 & M) >> 32
    /// K, N = 100, 20000
    /// label = np.array([255 if hash(i) % 11 == 0 else hash(i) % 97 % K for i in range(N)])
    /// other = np.array([hash(i + 1000000) for i in range(N)])
    /// predicted = np.where((other % 3 > 0) & (label != 255), label, other % 89 % K)
    /// keep = label != 255
    /// label, predicted = label[keep], predicted[keep]
    /// area = lambda x: np.histogram(x, bins=K, range=(0, K - 1))[0]
    /// both, of_label, of_predicted = area(predicted[predicted == label]), area(label), area(predicted)
    /// print(np.nanmean(both / (of_label + of_predicted - both)), both.sum() / of_label.sum(), np.nanmean(both / of_label))
    /// ```
    #[test]
    fn scores_equal_those_of_numpy() {
        let (labels, predicted) = pixels(20_000, 100);
        let Scores { mean_iou, pixel_accuracy, mean_accuracy, pixels } =
            counted(100, &labels, &predicted).scores();
        let near =
            |found: f64, expected: f64| assert!((found - expected).abs() < 1e-12, "{found}, not {expected}");
        near(mean_iou, 0.5089256224750386);
        near(pixel_accuracy, 0.6712109504360305);
        near(mean_accuracy, 0.6714919259007351);
        assert_eq!(pixels, 18118);
    }

    #[test]
    fn a_class_that_occurs_nowhere_is_left_out_and_one_only_predicted_counts() {
        // Class 2 is only predicted, class 3 occurs nowhere.
        let confusion = counted(4, &[0, 0, 1, 1, IGNORED], &[0, 2, 1, 1, 3]);
        let iou: Vec<_> = confusion.by_class().iter().map(|score| score.iou).collect();
        assert_eq!(iou, [Some(0.5), Some(1.0), Some(0.0), None]);
        let scores = confusion.scores();
        assert_eq!((scores.mean_iou, scores.mean_accuracy), (0.5, 0.75));
        assert_eq!((scores.pixel_accuracy, scores.pixels), (0.75, 4));
        assert_eq!(confusion.class(2).accuracy, None);
    }

    #[test]
    fn counts_of_ranks_add_up_in_any_order() {
        let (labels, predicted) = pixels(10_000, 30);
        let whole = counted(30, &labels, &predicted);
        for cut in [0, 1, 3333, 9999] {
            let mut one = counted(30, &labels[..cut], &predicted[..cut]);
            let mut other = counted(30, &labels[cut..], &predicted[cut..]);
            one.counts_mut().iter_mut().zip(other.counts_mut()).for_each(|(a, b)| *a += *b);
            assert_eq!(one, whole);
        }
    }

    #[test]
    fn what_cannot_be_counted_is_refused_and_changes_nothing() {
        let mut confusion = PixelConfusion::new(3);
        assert_eq!(confusion.add(&[0, 1], &[0]), Err(CountError::Lengths { labels: 2, predicted: 1 }));
        assert_eq!(confusion.add(&[0, 3], &[0, 0]), Err(CountError::Class { found: 3, classes: 3 }));
        assert_eq!(confusion.add(&[0, 1], &[0, IGNORED]), Err(CountError::Class { found: 255, classes: 3 }));
        assert_eq!(confusion, PixelConfusion::new(3));
        assert_eq!(confusion.scores().mean_iou, 0.0);
    }
}
