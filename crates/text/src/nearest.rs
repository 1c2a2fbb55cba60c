//! "Did you mean …?"

/// Longer words are no typing errors, and comparing them would take time.
const LONGEST: usize = 80;

/// The candidate that differs least from `word`, if it is near enough to have been meant: a third of the letters may differ, and one has
/// to be the same.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if word.is_empty() || word.len() > LONGEST {
        return None;
    }
    let (distance, best) =
        candidates.into_iter().map(|c| (distance(word, c), c)).min_by_key(|(distance, _)| *distance)?;
    let letters = word.chars().count();
    (distance <= (letters / 3).max(1) && distance < letters.max(best.chars().count())).then_some(best)
}

/// Letters to insert, remove or replace, or neighbours to swap.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before: Vec<usize> = vec![];
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut next = vec![i + 1];
        for (j, y) in b.iter().enumerate() {
            let mut least = (row[j] + usize::from(x != y)).min(next[j] + 1).min(row[j + 1] + 1);
            if i > 0 && j > 0 && *x == b[j - 1] && a[i - 1] == *y {
                least = least.min(before[j - 1] + 1);
            }
            next.push(least);
        }
        (before, row) = (row, next);
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typing_error_finds_what_was_meant_and_nonsense_finds_nothing() {
        let words = ["cifar10", "cifar100", "folder"];
        assert_eq!(nearest("cifra10", words), Some("cifar10"));
        assert_eq!(nearest("folders", words), Some("folder"));
        assert_eq!(nearest("imagenet", words), None);
        assert_eq!(nearest("", words), None);
        assert_eq!((nearest("4", ["0", "1"]), nearest("w", ["b", "s"])), (None, None));
        assert_eq!(nearest(&"x".repeat(100_000), words), None);
        assert_eq!(
            (distance("kitten", "sitting"), distance("modle", "model"), distance("ab", "")),
            (3, 1, 2)
        );
    }
}
