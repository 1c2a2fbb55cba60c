//! How the samples of a task become those of a batch.

use super::labels::Labels;
use super::maker::Prepare;
use super::masks::Masks;
use super::{Batch, Request};
use crate::augment::{CHOICES, Finish};
use crate::segment::{IGNORED, MaskFinish, MaskPreparer, MaskTransform};
use crate::{DataError, Dataset, Preparer, Task, Transform};
use std::ops::Range;
use std::sync::Arc;

/// Transform of a task's samples, and which part of it is left to a device.
#[derive(Clone, Debug, PartialEq)]
pub enum Preparation {
    /// For images with one label each. A device does what `finish` says, which is [`Finish::of`] the same set and transform.
    Labels { transform: Transform, finish: Option<Arc<Finish>> },
    /// For images with masks. Unless `finished`, normalisation is left to a device.
    Masks { transform: MaskTransform, finished: bool },
}

impl From<Transform> for Preparation {
    fn from(transform: Transform) -> Self {
        Preparation::Labels { transform, finish: None }
    }
}

impl From<MaskTransform> for Preparation {
    fn from(transform: MaskTransform) -> Self {
        Preparation::Masks { transform, finished: true }
    }
}

impl Preparation {
    /// Refuses settings that make no sense, and a set that they are not for.
    pub(super) fn check(&self, set: &dyn Dataset) -> Result<(), DataError> {
        let (task, expected) = match self {
            Preparation::Labels { transform, .. } => (Task::Classify, transform.channels),
            Preparation::Masks { transform, .. } => (Task::Segment, transform.channels),
        };
        match self {
            Preparation::Labels { transform, .. } => transform.check()?,
            Preparation::Masks { transform, .. } => transform.check()?,
        }
        if set.task() != task {
            let problem = format!("a transform for {task:?} of a set for {:?}", set.task());
            return Err(DataError::Call { what: "preparation", problem });
        }
        let found = set.channels();
        if found != expected {
            return Err(DataError::setting("channels", expected, format!("the images have {found}")));
        }
        Ok(())
    }

    /// Neighbours of the global order that are prepared together: mixing waits for nobody.
    pub(super) fn group(&self) -> usize {
        match self {
            Preparation::Labels { .. } => 2,
            Preparation::Masks { .. } => 1,
        }
    }

    /// A batch with room for `capacity` samples.
    pub(super) fn batch(&self, capacity: usize) -> Batch {
        let indices = vec![0; capacity];
        match self {
            Preparation::Labels { transform, finish } => {
                let images = if finish.is_none() { capacity * transform.sample_len() } else { 0 };
                let (pixels, choices) = match finish {
                    None => (0, 0),
                    Some(finish) if finish.resident.is_some() => (0, capacity * CHOICES),
                    Some(finish) => (finish.images(capacity) * finish.image_len(), capacity * CHOICES),
                };
                Batch {
                    images: vec![0.0; images],
                    pixels: vec![0; pixels],
                    choices: vec![0; choices],
                    labels: vec![0; capacity],
                    partners: vec![0; capacity],
                    mix: vec![1.0; capacity],
                    weights: vec![0.0; capacity],
                    indices,
                    ..Batch::default()
                }
            }
            Preparation::Masks { transform, finished } => {
                let (area, channels) = (capacity * transform.area(), transform.channels);
                let (here, device) = if *finished { (area, 0) } else { (0, area) };
                Batch {
                    images: vec![0.0; here * channels],
                    labels: vec![0; here],
                    weights: vec![0.0; here],
                    pixels: vec![0; device * channels],
                    masks: vec![IGNORED; device],
                    extents: vec![0; if *finished { 0 } else { 2 * capacity }],
                    indices,
                    ..Batch::default()
                }
            }
        }
    }

    /// Prepares samples; one for each thread.
    pub(super) fn preparer(&self) -> Result<Box<dyn Prepare>, DataError> {
        Ok(match self {
            Preparation::Labels { transform, finish } => {
                Box::new(Labels::new(Preparer::new(transform.clone())?, finish.clone()))
            }
            Preparation::Masks { transform, finished } => {
                let finish = if *finished { Some(MaskFinish::of(transform)?) } else { None };
                Box::new(Masks::new(MaskPreparer::new(transform.clone())?, finish))
            }
        })
    }

    /// Makes what a request leaves of a batch padding. Until here only places with a sample were written.
    pub(super) fn pad(&self, batch: &mut Batch) {
        for place in batch.request.count..batch.capacity() {
            batch.clear(place);
            if let Preparation::Labels { finish: Some(finish), .. } = self {
                finish.write_blank(&mut batch.choices[place * CHOICES..][..CHOICES]);
            }
        }
    }
}

impl Request {
    /// Groups of `group` neighbours that hold its samples.
    pub(super) fn groups(&self, group: usize) -> Range<usize> {
        if self.count == 0 { 0..0 } else { self.first / group..(self.first + self.count).div_ceil(group) }
    }

    pub(super) fn holds(&self, position: usize) -> bool {
        (self.first..self.first + self.count).contains(&position)
    }
}
