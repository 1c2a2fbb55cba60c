//! Random graphs: a few dozen ops over values of fitting shapes, some used many times, some not at all.

use super::{CLASSES, Draft};
use graph::op::{AttentionDrop, Per, Pooling};
use graph::random::Sequence;
use graph::{DType, Graph, Loss, Op, ValueId};

/// Beyond this, values don't grow in tokens.
const MANY_TOKENS: usize = 8;

/// The graph is a function of its number.
pub fn graph(number: u64, dtype: DType) -> Graph {
    let mut random = Sequence::new(number, 1);
    let batch = 2 + below(&mut random, 2);
    of_batch(batch, random, dtype)
}

/// As [`graph`], of so many samples.
pub fn wide_graph(number: u64, dtype: DType, batch: usize) -> Graph {
    of_batch(batch, Sequence::new(number, 1), dtype)
}

fn of_batch(batch: usize, random: Sequence, dtype: DType) -> Graph {
    let mut maker = Maker { draft: Draft::new(dtype, batch), random, values: vec![], weights: vec![] };
    maker.source();
    if maker.chance(0.5) {
        maker.source();
    }
    for _ in 0..5 + maker.below(21) {
        maker.grow();
    }
    maker.finish()
}

fn below(random: &mut Sequence, n: usize) -> usize {
    (random.uniform() * n as f64) as usize
}

struct Maker {
    draft: Draft,
    random: Sequence,
    /// Tokens (B,T,C) made so far, and whether something uses them.
    values: Vec<(ValueId, bool)>,
    /// Weights and biases made so far, to be used again.
    weights: Vec<(ValueId, ValueId)>,
}

impl Maker {
    fn below(&mut self, n: usize) -> usize {
        below(&mut self.random, n)
    }

    fn chance(&mut self, p: f64) -> bool {
        self.random.uniform() < p
    }

    fn one_of<U: Copy>(&mut self, list: &[U]) -> U {
        list[self.below(list.len())]
    }

    fn width(&self, x: ValueId) -> usize {
        self.draft.shape(x)[2]
    }

    fn keep(&mut self, x: ValueId) {
        if self.chance(0.2) {
            self.draft.border(x);
        }
        self.values.push((x, false));
    }

    /// One of the newer values, most of the time.
    fn pick(&mut self) -> ValueId {
        let n = self.values.len();
        let newest = if self.chance(0.7) { n.min(3) } else { n };
        let index = n - 1 - self.below(newest);
        self.values[index].1 = true;
        self.values[index].0
    }

    /// A value of the shape of `x`; it may be `x`.
    fn pick_like(&mut self, x: ValueId) -> ValueId {
        let shape = self.draft.shape(x);
        let like: Vec<usize> =
            (0..self.values.len()).filter(|i| self.draft.shape(self.values[*i].0) == shape).collect();
        let index = self.one_of(&like);
        self.values[index].1 = true;
        self.values[index].0
    }

    /// Tokens, or images cut into patches.
    fn source(&mut self) {
        let batch = self.draft.batch();
        let width = self.one_of(&[6, 8, 12]);
        let x = if self.chance(0.5) {
            let tokens = 1 + self.below(4);
            self.draft.parameter("tokens", [batch, tokens, width], 1.0)
        } else {
            let (height, wide) = (2 * (1 + self.below(2)), 2 * (1 + self.below(2)));
            let images = self.draft.parameter("images", [batch, 2, height, wide], 1.0);
            let patches = self.draft.one(Op::Patches { patch: 2 }, &[images]);
            let patches = self.draft.linear(patches, width);
            self.embed(patches)
        };
        self.keep(x);
    }

    fn embed(&mut self, patches: ValueId) -> ValueId {
        let [_, n, c] = self.draft.shape(patches)[..] else { unreachable!() };
        let class_token = n < MANY_TOKENS && self.chance(0.5);
        let positions = self.draft.parameter("positions", [1, n + usize::from(class_token), c], 0.5);
        let mut inputs = vec![patches, positions];
        if class_token {
            inputs.insert(1, self.draft.parameter("class_token", [1, 1, c], 1.0));
        }
        self.draft.one(Op::Embed { class_token }, &inputs)
    }

    fn linear(&mut self, x: ValueId, out: usize) -> ValueId {
        let fits = [out, self.width(x)];
        let again = self.weights.iter().copied().find(|(w, _)| self.draft.shape(*w) == fits);
        let (w, b) = match again {
            Some(tied) if self.chance(0.5) => tied,
            _ => {
                let w = self.draft.parameter("weight", fits, (1.0 / fits[1] as f64).sqrt());
                (w, self.draft.parameter("bias", [out], 0.5))
            }
        };
        self.weights.push((w, b));
        if self.chance(0.8) {
            self.draft.one(Op::Linear { bias: true, gelu: false }, &[x, w, b])
        } else {
            self.draft.one(Op::Linear { bias: false, gelu: false }, &[x, w])
        }
    }

    fn attention(&mut self, x: ValueId) -> ValueId {
        let x = if self.chance(0.5) { self.draft.layer_norm(x) } else { x };
        let width = self.one_of(&[6, 12]);
        let qkv = self.linear(x, 3 * width);
        let (heads, drops, site) = (self.one_of(&[1, 2, 3]), self.chance(0.5), self.draft.site());
        let drop = drops.then_some(AttentionDrop { rate: 0.3, site });
        self.draft.one(Op::Attention { heads, drop }, &[qkv])
    }

    /// Patches of 2×2 taken apart into four tokens each.
    fn reshape(&mut self, x: ValueId) -> ValueId {
        let [_, t, c] = self.draft.shape(x)[..] else { unreachable!() };
        if t > MANY_TOKENS / 2 || c % 4 != 0 {
            return self.draft.one(Op::Scale { factor: -0.7 }, &[x]);
        }
        let op = Op::Unpatches { patch: 2, channels: c / 4, height: 2 * t, width: 2 };
        let images = self.draft.one(op, &[x]);
        let tokens = self.draft.one(Op::Patches { patch: 1 }, &[images]);
        self.linear(tokens, 8)
    }

    fn drop(&mut self, x: ValueId) -> ValueId {
        let (per, site) = (self.one_of(&[Per::Element, Per::Sample]), self.draft.site());
        self.draft.one(Op::Drop { rate: 0.3, site, per }, &[x])
    }

    fn grow(&mut self) {
        let x = self.pick();
        let width = self.one_of(&[6, 8, 12]);
        let y = match self.below(11) {
            0 => self.linear(x, width),
            1 | 2 => {
                let hidden = self.linear(x, width);
                if self.chance(0.2) {
                    self.keep(hidden);
                }
                self.draft.one(Op::Gelu, &[hidden])
            }
            3 => self.draft.layer_norm(x),
            4 => self.attention(x),
            5 => self.drop(x),
            6 => self.embed(x),
            7 => self.reshape(x),
            8 => self.draft.one(Op::Gelu, &[x]),
            // A residual and its norm, both to be used.
            _ => {
                let other = self.pick_like(x);
                let sum = self.draft.one(Op::Add, &[x, other]);
                self.keep(sum);
                if self.chance(0.3) {
                    return;
                }
                self.pick();
                self.draft.layer_norm(sum)
            }
        };
        self.keep(y);
    }

    /// Every unused value has a part in the logits, but for a few that stay unused.
    fn finish(mut self) -> Graph {
        let mut loose: Vec<ValueId> = self.values.iter().filter(|v| !v.1).map(|v| v.0).collect();
        if loose.len() > 2 && self.chance(0.5) {
            loose.remove(0);
        }
        let mut logits: Option<ValueId> = None;
        for x in loose {
            let x = if self.chance(0.7) { self.draft.layer_norm(x) } else { x };
            let kind = self.one_of(&[Pooling::First, Pooling::Mean]);
            let pooled = self.draft.one(Op::Pool { kind }, &[x]);
            let part = self.draft.linear(pooled, CLASSES);
            logits = Some(match logits {
                Some(sum) => self.draft.one(Op::Add, &[sum, part]),
                None => part,
            });
        }
        let (smoothing, mixed) = (self.one_of(&[0.0, 0.1]), self.chance(0.5));
        self.draft.finish_loss(logits.unwrap(), Loss { smoothing, mixed })
    }
}
