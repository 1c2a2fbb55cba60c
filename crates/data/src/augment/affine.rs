//! Affine maps of an image, sampled at the nearest pixel; what comes in from outside is 0.

use crate::Image;

/// Map from a pixel (x, y) of the output to its place in the input: x' = xx·x + xy·y + x0, y' = yx·x + yy·y + y0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Affine {
    xx: f64,
    xy: f64,
    x0: f64,
    yx: f64,
    yy: f64,
    y0: f64,
}

const IDENTITY: Affine = Affine { xx: 1.0, xy: 0.0, x0: 0.0, yx: 0.0, yy: 1.0, y0: 0.0 };

impl Affine {
    /// About the corner at the top left.
    pub(super) fn shear(x: f64, y: f64) -> Self {
        Self { xy: x, yx: y, ..IDENTITY }
    }

    /// The image moves right and down.
    pub(super) fn translation(x: f64, y: f64) -> Self {
        Self { x0: -x, y0: -y, ..IDENTITY }
    }

    /// Counter-clockwise about the centre. Sine and cosine come from the platform's library; what is sampled depends on
    /// their first 16 bits only.
    pub(super) fn rotation(degrees: f64, image: &Image) -> Self {
        let (sin, cos) = degrees.to_radians().sin_cos();
        let (x, y) = (image.width as f64 / 2.0, image.height as f64 / 2.0);
        Self { xx: cos, xy: -sin, x0: x - cos * x + sin * y, yx: sin, yy: cos, y0: y - sin * x - cos * y }
    }
}

/// Maps an image of 1 or 3 channels.
pub(super) fn affine(map: Affine, image: &mut Image, spare: &mut Image) {
    spare.reset(image.width, image.height, image.channels);
    if image.channels == 1 {
        sample::<1>(map, image, spare);
    } else {
        sample::<3>(map, image, spare);
    }
    std::mem::swap(image, spare);
}

/// Samples the input as PIL does: in steps of 1/65536 pixel, beginning at the middle of the first one.
fn sample<const C: usize>(map: Affine, from: &Image, to: &mut Image) {
    let fixed = |v: f64| (v * 65536.0 + 0.5).floor() as i32;
    let Affine { xx, xy, x0, yx, yy, y0 } = map;
    let mut row_x = fixed(x0 + xx * 0.5 + xy * 0.5);
    let mut row_y = fixed(y0 + yx * 0.5 + yy * 0.5);
    let (xx, xy, yx, yy) = (fixed(xx), fixed(xy), fixed(yx), fixed(yy));
    let (width, height) = (from.width, from.height);
    let (pixels, _) = from.pixels.as_chunks::<C>();
    let (out, _) = to.pixels.as_chunks_mut::<C>();
    for row in out.chunks_exact_mut(width.max(1)) {
        let (mut x, mut y) = (row_x, row_y);
        for pixel in row {
            // What is negative becomes large, and so is outside as well.
            let (column, line) = ((x >> 16) as usize, (y >> 16) as usize);
            *pixel = if column < width && line < height { pixels[line * width + column] } else { [0; C] };
            x = x.wrapping_add(xx);
            y = y.wrapping_add(yx);
        }
        row_x = row_x.wrapping_add(xy);
        row_y = row_y.wrapping_add(yy);
    }
}
