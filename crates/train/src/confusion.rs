//! The confusion matrix of a classifier.

use serde::Serialize;

/// Counts of (true class, predicted class).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Confusion {
    classes: usize,
    /// (true, predicted), row by row.
    counts: Vec<u64>,
}

/// Scores of one class.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ClassScore {
    pub images: u64,
    /// Share of the class's images that were predicted as it; none without such images.
    pub recall: Option<f64>,
    /// Share of the images predicted as the class that belong to it; none if nothing was.
    pub precision: Option<f64>,
    /// Harmonic mean of both, as a ratio of counts: defined if either is.
    pub f1: Option<f64>,
}

/// Means of the classes' scores, each over those that have it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MacroScore {
    pub recall: Option<f64>,
    pub precision: Option<f64>,
    pub f1: Option<f64>,
}

impl Confusion {
    pub fn new(classes: usize) -> Self {
        Confusion { classes, counts: vec![0; classes * classes] }
    }

    /// Notes one image. Of equal logits the first wins, as in PyTorch.
    pub fn add(&mut self, label: usize, logits: &[f32]) {
        let predicted = first_largest(&logits[..self.classes]);
        self.counts[label * self.classes + predicted] += 1;
    }

    pub fn count(&self, label: usize, predicted: usize) -> u64 {
        self.counts[label * self.classes + predicted]
    }

    pub fn rows(&self) -> impl Iterator<Item = &[u64]> {
        self.counts.chunks_exact(self.classes.max(1))
    }

    pub fn class(&self, class: usize) -> ClassScore {
        let hits = self.count(class, class) as f64;
        let images: u64 = (0..self.classes).map(|predicted| self.count(class, predicted)).sum();
        let taken: u64 = (0..self.classes).map(|label| self.count(label, class)).sum();
        let share = |of: u64| (of > 0).then(|| hits / of as f64);
        let f1 = share(images + taken).map(|half| 2.0 * half);
        ClassScore { images, recall: share(images), precision: share(taken), f1 }
    }

    pub fn by_class(&self) -> Vec<ClassScore> {
        (0..self.classes).map(|class| self.class(class)).collect()
    }

    /// Means over classes, whatever their numbers of images.
    pub fn averages(&self) -> MacroScore {
        let classes = self.by_class();
        let mean = |of: fn(&ClassScore) -> Option<f64>| {
            let values: Vec<f64> = classes.iter().filter_map(of).collect();
            (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
        };
        MacroScore { recall: mean(|s| s.recall), precision: mean(|s| s.precision), f1: mean(|s| s.f1) }
    }

    /// Pairs of different classes (true, predicted, images), most often confused first.
    pub fn mistakes(&self) -> Vec<(usize, usize, u64)> {
        let pairs = (0..self.classes).flat_map(|label| (0..self.classes).map(move |other| (label, other)));
        let mut mistakes: Vec<_> = pairs
            .filter(|(label, other)| label != other)
            .map(|(label, other)| (label, other, self.count(label, other)))
            .filter(|(_, _, images)| *images > 0)
            .collect();
        mistakes.sort_by_key(|(label, other, images)| (std::cmp::Reverse(*images), *label, *other));
        mistakes
    }
}

fn first_largest(logits: &[f32]) -> usize {
    (1..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

/// The `k` most probable classes with their probabilities, from logits.
pub fn most_probable(logits: &[f32], k: usize) -> Vec<(usize, f32)> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - largest).exp()).sum();
    let probability = |x: f32| (f64::from(x - largest).exp() / sum) as f32;
    let mut ranked: Vec<(usize, f32)> = logits.iter().map(|&x| probability(x)).enumerate().collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
    ranked.truncate(k);
    ranked
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_hits_and_mistakes() {
        let mut confusion = Confusion::new(3);
        confusion.add(0, &[2.0, 1.0, 0.0]);
        confusion.add(0, &[0.0, 1.0, 0.0]);
        confusion.add(0, &[0.0, 1.0, 0.5]);
        confusion.add(1, &[1.0, 1.0, 0.0]);
        confusion.add(1, &[0.0, 4.0, 0.0]);
        assert_eq!(confusion.mistakes(), [(0, 1, 2), (1, 0, 1)]);
        let score = |images, recall, precision, f1| ClassScore { images, recall, precision, f1 };
        assert_eq!(confusion.class(0), score(3, Some(1.0 / 3.0), Some(0.5), Some(0.4)));
        assert_eq!(confusion.class(1), score(2, Some(0.5), Some(1.0 / 3.0), Some(0.4)));
        assert_eq!(confusion.class(2), score(0, None, None, None), "neither there nor predicted");
        let MacroScore { recall, precision, f1 } = confusion.averages();
        assert_eq!((recall, f1), (Some((1.0 / 3.0 + 0.5) / 2.0), Some(0.4)));
        assert_eq!(precision, Some((0.5 + 1.0 / 3.0) / 2.0));
        confusion.add(2, &[1.0, 0.0, 0.0]);
        assert_eq!(confusion.class(2), score(1, Some(0.0), None, Some(0.0)), "there, but never predicted");
        assert_eq!(Confusion::new(3).averages(), MacroScore { recall: None, precision: None, f1: None });
        assert_eq!(confusion.rows().map(|row| row.iter().sum::<u64>()).sum::<u64>(), 6);
    }

    #[test]
    fn probabilities_are_ranked_and_sum_to_one() {
        let ranked = most_probable(&[1.0, 3.0, 2.0, 1000.0f32.ln()], 4);
        assert_eq!(ranked.iter().map(|(class, _)| *class).collect::<Vec<_>>(), [3, 1, 2, 0]);
        assert!((ranked.iter().map(|(_, p)| p).sum::<f32>() - 1.0).abs() < 1e-6);
        assert_eq!(most_probable(&[0.0, 0.0], 1), [(0, 0.5)]);
    }
}
