//! Mixup and cutmix of two neighbours.

use super::Rect;
use super::beta::beta;
use crate::random::Stream;

/// Mixing of a pair. λ is each member's share of itself; the rest is its partner's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mix {
    Off,
    /// Mixup: every pixel is a weighted mean.
    Blend {
        lambda: f32,
    },
    /// Cutmix: a patch changes places with that of the partner.
    Patch {
        patch: Rect,
        lambda: f32,
    },
}

impl Mix {
    pub fn lambda(&self) -> f32 {
        match *self {
            Mix::Off => 1.0,
            Mix::Blend { lambda } | Mix::Patch { lambda, .. } => lambda,
        }
    }

    /// At least one of the two α is above 0.
    pub(super) fn draw(mixup: f64, cutmix: f64, size: u32, stream: &mut Stream) -> Self {
        let coin = stream.coin();
        let patch = if mixup > 0.0 && cutmix > 0.0 { coin } else { cutmix > 0.0 };
        if patch {
            let lambda = beta(cutmix, stream);
            Self::patch(lambda, size, stream)
        } else {
            Mix::Blend { lambda: beta(mixup, stream) as f32 }
        }
    }

    /// A patch of the area 1 − λ about a random pixel. What lies outside of the image is cut off, and λ corrected.
    fn patch(lambda: f64, size: u32, stream: &mut Stream) -> Self {
        let (x, y) = (stream.below(size.into()) as u32, stream.below(size.into()) as u32);
        let half = (0.5 * (1.0 - lambda).sqrt() * f64::from(size)) as u32;
        let (left, top) = (x.saturating_sub(half), y.saturating_sub(half));
        let (width, height) = ((x + half).min(size) - left, (y + half).min(size) - top);
        let share = f64::from(width) * f64::from(height) / (f64::from(size) * f64::from(size));
        Mix::Patch { patch: Rect { left, top, width, height }, lambda: (1.0 - share) as f32 }
    }

    /// Mixes two prepared samples (C, S, S) with each other.
    pub fn apply(&self, size: usize, one: &mut [f32], other: &mut [f32]) {
        match *self {
            Mix::Off => {}
            Mix::Blend { lambda } => {
                let rest = 1.0 - lambda;
                for (a, b) in one.iter_mut().zip(other) {
                    (*a, *b) = (lambda * *a + rest * *b, lambda * *b + rest * *a);
                }
            }
            Mix::Patch { patch, .. } => {
                for (one, other) in patch.rows(size, one).zip(patch.rows(size, other)) {
                    one.swap_with_slice(other);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blend_gives_each_the_share_of_the_other() {
        let (mut one, mut other) = ([1.0, 0.0, -1.0, 2.0], [0.0, 4.0, 1.0, 2.0]);
        Mix::Blend { lambda: 0.75 }.apply(2, &mut one, &mut other);
        assert_eq!(one, [0.75, 1.0, -0.5, 2.0]);
        assert_eq!(other, [0.25, 3.0, 0.5, 2.0]);
    }

    #[test]
    fn a_patch_changes_places_in_every_channel() {
        let (mut one, mut other) = ([1.0; 18], [2.0; 18]);
        let patch = Rect { left: 1, top: 0, width: 2, height: 1 };
        Mix::Patch { patch, lambda: 7.0 / 9.0 }.apply(3, &mut one, &mut other);
        let plane = [1.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
        assert_eq!(one, [plane, plane].concat()[..]);
        assert!(one.iter().zip(other).all(|(a, b)| a + b == 3.0));
    }

    #[test]
    fn lambda_is_what_is_left_of_the_area() {
        let mut stream = Stream::new(1);
        let mut clipped = 0;
        for _ in 0..1000 {
            let Mix::Patch { patch, lambda } = Mix::draw(0.0, 1.0, 20, &mut stream) else {
                panic!("no patch")
            };
            assert!(patch.left + patch.width <= 20 && patch.top + patch.height <= 20);
            assert_eq!(lambda, (1.0 - f64::from(patch.width * patch.height) / 400.0) as f32);
            clipped += usize::from(patch.width != patch.height);
        }
        assert!(clipped > 100, "{clipped}");
    }

    #[test]
    fn with_both_on_half_of_the_pairs_take_each() {
        let mut stream = Stream::new(1);
        let patches =
            (0..10_000).filter(|_| matches!(Mix::draw(0.8, 1.0, 32, &mut stream), Mix::Patch { .. })).count();
        assert!((4_800..5_200).contains(&patches), "{patches}");
    }
}
