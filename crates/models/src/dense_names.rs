//! Weights of dense heads at the border to other libraries: the names are theirs, but torch has convolutions as (O,I,kh,kw)
//! where ours are (O,kh,kw,I), or (O,I) for a kernel of one pixel, and three tensors where our running moments are one.

use crate::names::{Tensor, Weights};

/// Prefixes of the names of dense heads.
pub const HEADS: [&str; 2] = ["decode_head.", "auxiliary_head."];

const RUNNING: &str = ".running";
/// torch's names of the rows of running moments; files older than torch 0.4.1 lack the count.
const ROWS: [&str; 3] = [".running_mean", ".running_var", ".num_batches_tracked"];

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum DenseError {
    #[error("`{name}` is missing: running mean and variance come together")]
    MissingMoments { name: String },
    #[error("`{name}` is {shape:?}, but its running mean is {mean:?}")]
    UnlikeMoments { name: String, shape: Vec<usize>, mean: Vec<usize> },
    #[error("`{name}` is {shape:?}, which is not the weight of a layer of a dense head")]
    Shape { name: String, shape: Vec<usize> },
    #[error("`{name}` is {shape:?} but holds {values} values")]
    Torn { name: String, shape: Vec<usize>, values: usize },
}

fn is_head(name: &str) -> bool {
    HEADS.iter().any(|head| name.starts_with(head))
}

/// Converts from torch's layout to ours; tensors that belong to no head are unchanged.
pub fn from_torch(weights: Weights) -> Result<Weights, DenseError> {
    let mut ours = Weights::new();
    let mut rows = Weights::new();
    for (name, tensor) in weights {
        if is_head(&name) && !tensor.is_whole() {
            let values = tensor.data.len();
            return Err(DenseError::Torn { name, shape: tensor.shape, values });
        }
        match &tensor.shape[..] {
            _ if !is_head(&name) => ours.insert(name, tensor),
            _ if ROWS.iter().any(|row| name.ends_with(row)) => rows.insert(name, tensor),
            [o, i, 1, 1] => {
                let shape = vec![*o, *i];
                ours.insert(name, Tensor { shape, data: tensor.data })
            }
            [o, i, h, w] => {
                let shape = vec![*o, *h, *w, *i];
                let data = transposed(&tensor.data, (*i, h * w));
                ours.insert(name, Tensor { shape, data })
            }
            [_] => ours.insert(name, tensor),
            _ => return Err(DenseError::Shape { name, shape: tensor.shape }),
        };
    }
    join_rows(rows, &mut ours)?;
    Ok(ours)
}

/// Running moments (3,C) of their rows.
fn join_rows(mut rows: Weights, ours: &mut Weights) -> Result<(), DenseError> {
    let stems: std::collections::BTreeSet<String> =
        rows.keys().filter_map(|name| Some(name.rsplit_once('.')?.0.to_string())).collect();
    for stem in stems {
        let mut take = |row: usize| {
            let name = format!("{stem}{}", ROWS[row]);
            rows.remove(&name).ok_or(DenseError::MissingMoments { name })
        };
        let (mean, variance, count) = (take(0)?, take(1)?, take(2));
        if variance.shape != mean.shape || mean.shape.len() != 1 {
            let (name, shape) = (format!("{stem}{}", ROWS[1]), variance.shape);
            return Err(DenseError::UnlikeMoments { name, shape, mean: mean.shape });
        }
        let channels = mean.data.len();
        let count = count.ok().and_then(|t| t.data.first().copied()).unwrap_or(0.0);
        let data = [mean.data, variance.data, vec![count; channels]].concat();
        ours.insert(format!("{stem}{RUNNING}"), Tensor { shape: vec![3, channels], data });
    }
    Ok(())
}

/// Converts from our layout to torch's; the reverse of [`from_torch`].
pub fn to_torch(weights: Weights) -> Result<Weights, DenseError> {
    let mut theirs = Weights::new();
    for (name, tensor) in weights {
        if is_head(&name) && !tensor.is_whole() {
            let values = tensor.data.len();
            return Err(DenseError::Torn { name, shape: tensor.shape, values });
        }
        match (&tensor.shape[..], name.strip_suffix(RUNNING)) {
            _ if !is_head(&name) => {
                theirs.insert(name, tensor);
            }
            ([3, channels], Some(stem)) => {
                let row = |i: usize| tensor.data[i * channels..(i + 1) * channels].to_vec();
                for (i, suffix) in ROWS.into_iter().enumerate() {
                    let (shape, data) = match i {
                        // A number of batches for all channels, which an average may have left between two.
                        2 => (vec![], row(2).first().map(|count| count.round()).into_iter().collect()),
                        _ => (vec![*channels], row(i)),
                    };
                    theirs.insert(format!("{stem}{suffix}"), Tensor { shape, data });
                }
            }
            ([o, i], None) => {
                theirs.insert(name, Tensor { shape: vec![*o, *i, 1, 1], data: tensor.data });
            }
            ([o, h, w, i], None) => {
                let data = transposed(&tensor.data, (h * w, *i));
                theirs.insert(name, Tensor { shape: vec![*o, *i, *h, *w], data });
            }
            ([_], None) => {
                theirs.insert(name, tensor);
            }
            _ => return Err(DenseError::Shape { name, shape: tensor.shape }),
        }
    }
    Ok(theirs)
}

/// Matrices of (rows, columns), one after the other, each turned into (columns, rows).
fn transposed(data: &[f32], (rows, columns): (usize, usize)) -> Vec<f32> {
    let one = |matrix: &[f32]| {
        let at = |i: usize| matrix[i % rows * columns + i / rows];
        (0..matrix.len()).map(at).collect::<Vec<f32>>()
    };
    data.chunks_exact((rows * columns).max(1)).flat_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::upernet::UperNet;
    use graph::{Builder, DType, Loss};

    fn counted(shape: Vec<usize>, first: usize) -> Tensor {
        let values = shape.iter().product::<usize>();
        Tensor { shape, data: (first..first + values).map(|i| i as f32).collect() }
    }

    /// Every state of small heads that weights hold, each value unlike every other, but for counts.
    fn small() -> Weights {
        let mut b = Builder::new(DType::F32, true);
        let stages = [0, 1, 2, 3].map(|i| b.input(&format!("stage.{i}"), DType::F32, [1, 4, 4, 2 + i]));
        let targets = b.targets([1, 8, 8], false);
        let net = UperNet { classes: 3, channels: 4, auxiliary: 5, dropout: 0.0 };
        let ends = net.finish(&mut b, stages, (8, 8), targets, Loss::default());
        let graph = b.finish(&ends.values()).unwrap();
        let mut next = 0;
        let tensors = graph.states.into_iter().map(|state| {
            let mut tensor = counted(state.ty.shape.0, next);
            next += tensor.data.len();
            if state.name.ends_with(RUNNING) {
                let channels = tensor.shape[1];
                tensor.data[2 * channels..].fill(7.0);
            }
            (state.name, tensor)
        });
        tensors.collect()
    }

    #[test]
    fn there_and_back_changes_nothing() {
        let ours = small();
        let theirs = to_torch(ours.clone()).unwrap();
        assert_eq!(from_torch(theirs.clone()).unwrap(), ours);
        assert_eq!(theirs.len(), ours.len() + 2 * 13, "three tensors for each of the running moments");
        let shape = |name: &str| theirs[name].shape.clone();
        assert_eq!(shape("decode_head.classifier.weight"), [3, 4, 1, 1]);
        assert_eq!(shape("decode_head.bottleneck.conv.weight"), [4, 5 + 4 * 4, 3, 3]);
        assert_eq!(shape("decode_head.psp_modules.2.1.batch_norm.running_var"), [4]);
        assert_eq!(shape("auxiliary_head.convs.0.batch_norm.num_batches_tracked"), [0; 0]);
        assert_eq!(theirs["auxiliary_head.convs.0.batch_norm.num_batches_tracked"].data, [7.0]);
    }

    #[test]
    fn axes_of_a_convolution_change_places() {
        let name = "decode_head.bottleneck.conv.weight".to_string();
        let theirs = Weights::from([(name.clone(), counted(vec![2, 3, 2, 2], 0))]);
        let ours = from_torch(theirs.clone()).unwrap();
        let at = |o: usize, y: usize, x: usize, i: usize| ours[&name].data[((o * 2 + y) * 2 + x) * 3 + i];
        assert_eq!(ours[&name].shape, [2, 2, 2, 3]);
        for (o, i, y, x) in [(0, 0, 0, 1), (1, 2, 1, 0), (1, 0, 1, 1)] {
            assert_eq!(at(o, y, x, i), (((o * 3 + i) * 2 + y) * 2 + x) as f32);
        }
        assert_eq!(to_torch(ours).unwrap(), theirs);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let theirs = to_torch(small()).unwrap();
        let norm = "auxiliary_head.convs.0.batch_norm";
        let mut without = theirs.clone();
        without.remove(&format!("{norm}.running_var"));
        let error = from_torch(without).unwrap_err().to_string();
        assert_eq!(
            error,
            format!("`{norm}.running_var` is missing: running mean and variance come together")
        );
        let mut unlike = theirs.clone();
        unlike.insert(format!("{norm}.running_var"), counted(vec![2], 0));
        let error = from_torch(unlike).unwrap_err().to_string();
        assert_eq!(error, format!("`{norm}.running_var` is [2], but its running mean is [5]"));
        let mut early = theirs.clone();
        early.remove(&format!("{norm}.num_batches_tracked"));
        assert_eq!(from_torch(early).unwrap()[&format!("{norm}.running")].data[10..], [0.0; 5]);
        let mut odd = theirs;
        odd.insert("decode_head.classifier.weight".into(), counted(vec![3, 4, 1], 0));
        let error = from_torch(odd).unwrap_err().to_string();
        let what = "which is not the weight of a layer of a dense head";
        assert_eq!(error, format!("`decode_head.classifier.weight` is [3, 4, 1], {what}"));
    }
}
