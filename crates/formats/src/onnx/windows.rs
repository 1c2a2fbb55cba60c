//! The ONNX form of Swin V2's ops. Rolling, padding and cutting a map into windows is one Gather by constant indices, from the same
//! functions that kernels use ([`graph::Windows`]).
//!
//! Legend: B batch, h and w rows and columns of a map, C channels, H heads, D head size, W windows, T tokens of a window, K offsets
//! between two of them, N width of the hidden layer of the position bias.

use super::operand::{Operand, ints, reshape, softmax, transpose};
use super::writer::{Attribute, Writer};
use graph::Windows;
use graph::windows::Offsets;

/// Least length that a query or key is divided by, as in torch's `normalize`.
const LEAST: f32 = 1e-12;
/// Largest factor of a cosine.
const MOST: f64 = 100.0;
/// Added to scores of tokens that aren't neighbours.
const APART: f32 = -100.0;

/// (B,h,w,C) → (B,⌈h/2⌉,⌈w/2⌉,4C).
pub fn merge(w: &mut Writer, map: &Operand<'_>) -> Option<String> {
    let &[_, rows, columns, c] = map.shape else { return None };
    let (halved_rows, halved_columns) = (rows.div_ceil(2), columns.div_ceil(2));
    let mut x = map.name.clone();
    if rows % 2 + columns % 2 > 0 {
        let pads = w.row(&[0, 0, 0, 0, 0, (rows % 2) as i64, (columns % 2) as i64, 0]);
        x = w.node("Pad", &[&x, &pads], vec![]);
    }
    let y = reshape(w, &x, &[halved_rows, 2, halved_columns, 2, c]);
    let y = transpose(w, &y, &[0, 1, 3, 4, 2, 5]);
    Some(reshape(w, &y, &[halved_rows, halved_columns, 4 * c]))
}

/// w1 (N,2), b1 (N), w2 (H,N) → (H,T,T): the network for each of the K offsets, then a lookup for each pair of tokens.
pub fn position_bias(
    w: &mut Writer,
    window: [usize; 2],
    pretrained: Option<[usize; 2]>,
    [w1, b1, w2]: [&Operand<'_>; 3],
) -> Option<String> {
    let (offsets, t) = (Offsets::new(window, pretrained), window[0] * window[1]);
    let [by, of] = [window, pretrained.unwrap_or(window)].map(|[rows, columns]| format!("{rows}x{columns}"));
    let coordinates = || (0..offsets.count()).flat_map(|number| offsets.coordinates(number)).collect();
    let coordinates = w.floats(&format!("offsets_{by}_of_{of}"), &[offsets.count(), 2], coordinates);
    let pairs = || (0..t).flat_map(|from| (0..t).map(move |to| offsets.number(from, to) as i64)).collect();
    let pairs = w.ints(&format!("pairs_{by}"), &[t, t], pairs);
    let (w1, b1, w2) = (w1.transposed(w)?, b1.get(w), w2.transposed(w)?);
    let y = w.node("MatMul", &[&coordinates, &w1], vec![]);
    let y = w.node("Add", &[&y, &b1], vec![]);
    let y = w.node("Relu", &[&y], vec![]);
    let y = w.node("MatMul", &[&y, &w2], vec![]); // (K,H)
    let y = w.node("Sigmoid", &[&y], vec![]);
    let sixteen = w.float(16.0);
    let y = w.node("Mul", &[&y, &sixteen], vec![]);
    let y = w.node("Gather", &[&y, &pairs], vec![("axis", Attribute::Int(0))]); // (T,T,H)
    Some(transpose(w, &y, &[2, 0, 1]))
}

/// qkv (B,h,w,3C), biases of queries (C) and values (C), logit scale (H,1,1), position bias (H,T,T) → (B,h,w,C).
pub fn attention(
    w: &mut Writer,
    heads: usize,
    windows: &Windows,
    qkv: &Operand<'_>,
    [q_bias, v_bias, scale, bias]: [&Operand<'_>; 4],
) -> Option<String> {
    let &[_, rows, columns, packed] = qkv.shape else { return None };
    let (map, c, d) = ([rows, columns], packed / 3, packed / 3 / heads);
    let (count, t) = (windows.count(map), windows.tokens());
    let cut = Cut::new(windows, map);

    let tokens = reshape(w, &qkv.name, &[rows * columns, packed]);
    let tokens = cut.divide(w, &tokens);
    let tokens = reshape(w, &tokens, &[count, t, packed]);
    let [q, k, v] = w.split(&tokens, [c; 3]);
    let (q_bias, v_bias) = (q_bias.get(w), v_bias.get(w));
    let q = w.node("Add", &[&q, &q_bias], vec![]);
    let v = w.node("Add", &[&v, &v_bias], vec![]);
    let [q, k, v] = [q, k, v].map(|part| reshape(w, &part, &[count, t, heads, d]));

    let q = transpose(w, &q, &[0, 1, 3, 2, 4]); // (B,W,H,T,D)
    let q = normalised(w, &q, 4);
    let factor = factor(w, scale);
    let q = w.node("Mul", &[&q, &factor], vec![]);
    let k = transpose(w, &k, &[0, 1, 3, 4, 2]); // (B,W,H,D,T)
    let k = normalised(w, &k, 3);
    let scores = w.node("MatMul", &[&q, &k], vec![]); // (B,W,H,T,T)
    let mut scores = w.node("Add", &[&scores, &bias.name], vec![]);
    if let Some(mask) = cut.mask(w) {
        scores = w.node("Add", &[&scores, &mask], vec![]);
    }
    let shares = softmax(w, &scores);
    let v = transpose(w, &v, &[0, 1, 3, 2, 4]);
    let y = w.node("MatMul", &[&shares, &v], vec![]); // (B,W,H,T,D)
    let y = transpose(w, &y, &[0, 1, 3, 2, 4]);
    let y = reshape(w, &y, &[count * t, c]);
    let y = cut.join(w, &y);
    Some(reshape(w, &y, &[rows, columns, c]))
}

/// Vectors along an axis, over their lengths.
fn normalised(w: &mut Writer, x: &str, axis: i64) -> String {
    let lengths = w.node("ReduceL2", &[x], vec![("axes", ints([axis])), ("keepdims", Attribute::Int(1))]);
    let least = w.float(LEAST);
    let lengths = w.node("Max", &[&lengths, &least], vec![]);
    w.node("Div", &[x, &lengths], vec![])
}

/// exp(min(scale, ln 100)).
fn factor(w: &mut Writer, scale: &Operand<'_>) -> String {
    let (scale, most) = (scale.get(w), w.float(MOST.ln() as f32));
    let scale = w.node("Min", &[&scale, &most], vec![]);
    w.node("Exp", &[&scale], vec![])
}

/// A map cut into windows.
struct Cut<'a> {
    windows: &'a Windows,
    map: [usize; 2],
    /// Place in the map of each token of each window; none for padding.
    places: Vec<Option<usize>>,
    /// Name of this geometry.
    name: String,
}

impl<'a> Cut<'a> {
    fn new(windows: &'a Windows, map: [usize; 2]) -> Self {
        let (t, Windows { size, shift }) = (windows.tokens(), windows);
        let place = |at: usize| windows.place(map, at / t, at % t);
        let name = [map, *size, *shift].map(|[rows, columns]| format!("{rows}x{columns}")).join("_");
        Cut { windows, map, places: (0..windows.count(map) * t).map(place).collect(), name }
    }

    /// True for a map that is one window, in its own order.
    fn is_whole(&self) -> bool {
        self.places.iter().enumerate().all(|(at, place)| *place == Some(at))
    }

    /// (B,h·w,C) → (B,W·T,C).
    fn divide(&self, w: &mut Writer, tokens: &str) -> String {
        if self.is_whole() {
            return tokens.to_string();
        }
        let zeros = self.map[0] * self.map[1];
        let mut tokens = tokens.to_string();
        if self.places.contains(&None) {
            let pads = w.row(&[0, 0, 0, 0, 1, 0]);
            tokens = w.node("Pad", &[&tokens, &pads], vec![]);
        }
        let places = || self.places.iter().map(|place| place.unwrap_or(zeros) as i64).collect();
        let places = w.ints(&format!("windows_{}", self.name), &[self.places.len()], places);
        w.node("Gather", &[&tokens, &places], vec![("axis", Attribute::Int(1))])
    }

    /// (B,W·T,C) → (B,h·w,C), without the padding.
    fn join(&self, w: &mut Writer, tokens: &str) -> String {
        if self.is_whole() {
            return tokens.to_string();
        }
        let back = || {
            let mut back = vec![0; self.map[0] * self.map[1]];
            let places = self.places.iter().enumerate().filter_map(|(at, place)| Some((at, (*place)?)));
            places.for_each(|(at, place)| back[place] = at as i64);
            back
        };
        let back = w.ints(&format!("map_{}", self.name), &[self.map[0] * self.map[1]], back);
        w.node("Gather", &[tokens, &back], vec![("axis", Attribute::Int(1))])
    }

    /// Numbers to add to scores (W,1,T,T), where any tokens of a window don't see each other.
    fn mask(&self, w: &mut Writer) -> Option<String> {
        let (windows, map, t) = (self.windows, self.map, self.windows.tokens());
        let count = windows.count(map);
        if !(0..count).any(|window| windows.is_masked(map, window)) {
            return None;
        }
        let regions =
            || (0..count * t).map(|at| windows.region(map, at / t, at % t) as i64).collect::<Vec<_>>();
        Some(w.once(&format!("mask_{}", self.name), |w| {
            let rows = w.ints(&format!("regions_{}", self.name), &[count, 1, t, 1], regions);
            let columns = w.ints(&format!("regions_{}.T", self.name), &[count, 1, 1, t], regions);
            let same = w.node("Equal", &[&rows, &columns], vec![]);
            let (none, apart) = (w.float(0.0), w.float(APART));
            w.node("Where", &[&same, &none, &apart], vec![])
        }))
    }
}
