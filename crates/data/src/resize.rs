//! Resizing, antialiased as in PIL.

use crate::Image;
use fast_image_resize as fir;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Interpolation {
    Bilinear,
    /// With a = -0.5.
    Bicubic,
}

/// The part of an image that is read, in pixels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CropBox {
    pub left: f64,
    pub top: f64,
    pub width: f64,
    pub height: f64,
}

impl CropBox {
    pub fn whole(image: &Image) -> Self {
        Self { left: 0.0, top: 0.0, width: image.width as f64, height: image.height as f64 }
    }
}

/// Keeps its scratch memory; each thread has one.
#[derive(Default)]
pub struct Resizer(fir::Resizer);

impl Resizer {
    pub fn new() -> Self {
        Self::default()
    }

    /// Replaces `out` by the pixels of `from` within `crop`, resized to `to` (width, height). Filters see no pixel
    /// outside the box.
    pub fn resize(
        &mut self,
        from: &Image,
        crop: CropBox,
        to: (usize, usize),
        how: Interpolation,
        out: &mut Image,
    ) {
        let pixels = out.reset(to.0, to.1, from.channels);
        pixels.fill(0);
        let pixel = match from.channels {
            1 => fir::PixelType::U8,
            2 => fir::PixelType::U8x2,
            3 => fir::PixelType::U8x3,
            _ => fir::PixelType::U8x4,
        };
        let filter = match how {
            Interpolation::Bilinear => fir::FilterType::Bilinear,
            Interpolation::Bicubic => fir::FilterType::CatmullRom,
        };
        let (left, top) = (crop.left.floor(), crop.top.floor());
        let (right, bottom) = ((crop.left + crop.width).ceil(), (crop.top + crop.height).ceil());
        let options = fir::ResizeOptions::new()
            .resize_alg(fir::ResizeAlg::Convolution(filter))
            .crop(crop.left - left, crop.top - top, crop.width, crop.height)
            .use_alpha(false);
        let source = fir::images::ImageRef::new(from.width as u32, from.height as u32, &from.pixels, pixel);
        let target = fir::images::Image::from_slice_u8(to.0 as u32, to.1 as u32, pixels, pixel);
        let (Ok(source), Ok(mut target)) = (source, target) else { return };
        let (width, height) = ((right - left) as u32, (bottom - top) as u32);
        if let Ok(part) = fir::images::CroppedImage::new(&source, left as u32, top as u32, width, height) {
            let _ = self.0.resize(&part, &mut target, &options);
        }
    }
}
