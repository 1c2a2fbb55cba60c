//! Preparing images on a GPU: how its plans begin, and the tables they read.

use crate::device::{Device, planned};
use crate::error::DeviceError;
use crate::real::Real;
use config::sets::Sets;
use config::{Device as Chosen, Resolved, Task};
use data::{Dataset, Finish, Sample};
use graph::{DType, Delivery, Model};
use std::sync::Arc;

/// Sets of up to this many bytes lie on the GPU as a whole.
const RESIDENT: usize = 1 << 30;

/// Of training, unless nothing is trained, and of evaluation.
#[derive(Clone)]
pub struct Finishing {
    pub train: Option<Arc<Finish>>,
    pub eval: Arc<Finish>,
}

impl Finishing {
    /// None where the host prepares images, as it does for the CPU, and images with masks for every device.
    pub fn of<T: Real>(run: &Resolved, sets: &Sets, trains: bool) -> Result<Option<Self>, DeviceError> {
        if run.device == Chosen::Cpu || <T as Real>::DTYPE != DType::F32 || run.task() == Task::Segment {
            return Ok(None);
        }
        let finish = |set: &dyn Dataset, transform| -> Result<Arc<Finish>, DeviceError> {
            let finish = Finish::of(&transform, set)?;
            let fits = set.in_memory() && set.len() * finish.image_len() <= RESIDENT;
            Ok(Arc::new(if fits { finish.with_resident(set.len()) } else { finish }))
        };
        let train =
            trains.then(|| finish(&*sets.train, run.augmentation.training(&run.network))).transpose()?;
        Ok(Some(Finishing { train, eval: finish(&*sets.test, run.augmentation.evaluation(&run.network))? }))
    }

    /// A model that begins with bytes, for batches of this many images.
    pub fn begin(&self, model: Model, batch: usize) -> Result<Model, DeviceError> {
        let train = self.train.as_ref().map(|finish| delivery(finish, batch));
        Ok(graph::prepare(model, train.as_ref(), Some(&delivery(&self.eval, batch)))?)
    }

    /// Fills the states that never change.
    pub fn fill<T: Real>(&self, device: &mut dyn Device<T>, sets: &Sets) -> Result<(), DeviceError> {
        if let Some(train) = &self.train {
            fill(device, "train", train, &*sets.train)?;
        }
        fill(device, "eval", &self.eval, &*sets.test)
    }
}

fn delivery(finish: &Finish, batch: usize) -> Delivery {
    let &Finish { height, width, resident, .. } = finish;
    let (images, resident) = (finish.images(batch), resident.is_some());
    Delivery { height, width, images, resident, taps: finish.taps_shape() }
}

fn fill<T: Real>(
    device: &mut dyn Device<T>,
    name: &str,
    finish: &Finish,
    set: &dyn Dataset,
) -> Result<(), DeviceError> {
    let mut put = |what: &str, bytes: &[u8]| {
        let id = planned(device.find_state(&format!("{name}.{what}")));
        device.write_bytes(id, bytes)
    };
    let levels: Vec<u8> = finish.levels().iter().flat_map(|x| x.to_le_bytes()).collect();
    put("levels", &levels)?;
    if finish.taps_shape().is_some() {
        let taps: Vec<u8> = finish.taps().iter().flat_map(|x| x.to_le_bytes()).collect();
        put("taps", &taps)?;
    }
    if let Some(images) = finish.resident {
        let (len, mut sample) = (finish.image_len(), Sample::default());
        let mut pixels = Vec::with_capacity(images * len);
        for index in 0..images {
            set.read(index, &mut sample)?;
            pixels.extend_from_slice(&sample.image.pixels);
        }
        put("pixels", &pixels)?;
    }
    Ok(())
}
