//! Resizing, antialiased as in PIL.

use crate::{DataError, Image};
use fast_image_resize as fir;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interpolation {
    Bilinear,
    Bicubic,
}

/// A part of an image in pixels, which need not begin or end at whole ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CropBox {
    pub left: f64,
    pub top: f64,
    pub width: f64,
    pub height: f64,
}

/// Keeps the memory that resizing needs between calls.
#[derive(Default)]
pub struct Resizer(fir::Resizer);

impl Resizer {
    pub fn new() -> Self {
        Self::default()
    }

    /// Resizes the part `crop` of an image to `to` (width, height).
    ///
    /// As with PIL's `resize(box=…)`, pixels near the part's edge also see their neighbours outside of it.
    pub fn resize(
        &mut self,
        from: &Image,
        crop: CropBox,
        to: (usize, usize),
        how: Interpolation,
        out: &mut Image,
    ) -> Result<(), DataError> {
        let CropBox { left, top, width, height } = crop;
        let (image_width, image_height) = (from.width, from.height);
        let outside = DataError::Region { left, top, width, height, image_width, image_height };
        let pixel = match from.channels {
            1 => fir::PixelType::U8,
            2 => fir::PixelType::U8x2,
            3 => fir::PixelType::U8x3,
            4 => fir::PixelType::U8x4,
            _ => return Err(outside),
        };
        let filter = match how {
            Interpolation::Bilinear => fir::FilterType::Bilinear,
            Interpolation::Bicubic => fir::FilterType::CatmullRom,
        };
        let options = fir::ResizeOptions::new()
            .resize_alg(fir::ResizeAlg::Convolution(filter))
            .crop(left, top, width, height)
            .use_alpha(false);
        let pixels = out.reset(to.0, to.1, from.channels);
        let source = fir::images::ImageRef::new(from.width as u32, from.height as u32, &from.pixels, pixel);
        let target = fir::images::Image::from_slice_u8(to.0 as u32, to.1 as u32, pixels, pixel);
        let (Ok(source), Ok(mut target)) = (source, target) else { return Err(outside) };
        self.0.resize(&source, &mut target, &options).map_err(|_| outside)
    }
}
