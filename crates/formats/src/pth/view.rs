//! A tensor as PyTorch describes it: a view of a storage, from an offset on, with a stride for each dimension.

use std::borrow::Cow;

use data::pickle::Value;
use models::names;
use safetensors::Dtype;

use crate::tensors::{MAX_RANK, TensorFault, read_as};

/// Classes of storages: what they hold, and how many bytes a value has.
const STORAGES: [(&str, Dtype, usize); 10] = [
    ("FloatStorage", Dtype::F32, 4),
    ("HalfStorage", Dtype::F16, 2),
    ("BFloat16Storage", Dtype::BF16, 2),
    ("DoubleStorage", Dtype::F64, 8),
    ("LongStorage", Dtype::I64, 8),
    ("IntStorage", Dtype::I32, 4),
    ("ShortStorage", Dtype::I16, 2),
    ("CharStorage", Dtype::I8, 1),
    ("ByteStorage", Dtype::U8, 1),
    ("BoolStorage", Dtype::BOOL, 1),
];

pub(super) fn storage_type(class: &str) -> Option<(Dtype, usize)> {
    STORAGES.iter().find(|(name, ..)| *name == class).map(|&(_, dtype, width)| (dtype, width))
}

/// Functions of `torch._utils` that make a tensor of (storage, offset, shape, strides, …).
pub(super) fn makes_tensor(function: &str) -> bool {
    matches!(function, "_rebuild_tensor" | "_rebuild_tensor_v2")
}

/// Functions of `torch._utils` that make a parameter of (tensor, …).
pub(super) fn makes_parameter(function: &str) -> bool {
    function == "_rebuild_parameter"
}

/// Key and type of a storage: ("storage", class, key, device, …).
pub(super) fn storage(reference: Value<'_>) -> Option<(&str, Dtype, usize)> {
    let parts = reference.persistent_id()?;
    let (module, class) = parts.item(1)?.global()?;
    let is_storage = parts.item(0)?.text()? == "storage" && module == "torch";
    let (dtype, width) = storage_type(class).filter(|_| is_storage)?;
    Some((parts.item(2)?.text()?, dtype, width))
}

#[derive(Debug, PartialEq)]
pub(super) struct View {
    pub dtype: Dtype,
    /// Bytes per value.
    pub width: usize,
    pub offset: usize,
    pub shape: Vec<usize>,
    pub strides: Vec<usize>,
    /// The product of `shape`.
    pub elements: usize,
}

impl View {
    /// Storage and view of a tensor or parameter; `None` for any other value.
    ///
    /// Within that, no view of a tensor whose values are whole numbers.
    pub fn of(value: Value<'_>) -> Option<Result<Option<(&str, View)>, TensorFault>> {
        let of_torch = |module: &str| module == "torch._utils";
        let inner = value.call_of(|module, name| of_torch(module) && makes_parameter(name));
        let tensor = inner.map_or(Some(value), |args| args.item(0))?;
        let args = tensor.call_of(|module, name| of_torch(module) && makes_tensor(name))?;
        Some(View::described(args))
    }

    fn described(args: Value<'_>) -> Result<Option<(&str, View)>, TensorFault> {
        let parts = || {
            let offset = usize::try_from(args.item(1)?.int()?).ok()?;
            Some((storage(args.item(0)?)?, offset, args.item(2)?, args.item(3)?))
        };
        let ((key, dtype, width), offset, shape, strides) = parts().ok_or(TensorFault::Malformed)?;
        if !matches!(dtype, Dtype::F32 | Dtype::F64 | Dtype::F16 | Dtype::BF16) {
            return Ok(None);
        }
        let (shape, strides) = (numbers(shape)?, numbers(strides)?);
        if shape.len() != strides.len() {
            return Err(TensorFault::Malformed);
        }
        let Some(elements) = names::elements(&shape) else {
            return Err(TensorFault::Overflow { shape, dtype });
        };
        Ok(Some((key, View { dtype, width, offset, shape, strides, elements })))
    }

    /// The values, row by row, out of the bytes of the storage.
    pub fn values(&self, storage: &[u8]) -> Result<Vec<f32>, TensorFault> {
        let stored = storage.len() / self.width;
        // A storage that is smaller than its view would let a few bytes become any number of values.
        let fits = self.end().is_some_and(|end| end <= stored) && self.elements <= stored;
        if !fits {
            let (shape, strides) = (self.shape.clone(), self.strides.clone());
            return Err(TensorFault::Beyond { shape, strides, offset: self.offset, stored });
        }
        read_as(self.dtype, &self.row_major(storage))
    }

    /// The number of values a storage must have, unless that overflows.
    fn end(&self) -> Option<usize> {
        if self.elements == 0 {
            return Some(0);
        }
        let reach =
            |end: usize, (side, stride): (&usize, &usize)| end.checked_add((side - 1).checked_mul(*stride)?);
        let last = self.shape.iter().zip(&self.strides).try_fold(self.offset, reach)?;
        last.checked_add(1)
    }

    fn row_major<'a>(&self, storage: &'a [u8]) -> Cow<'a, [u8]> {
        let (width, begin) = (self.width, self.offset.saturating_mul(self.width));
        if self.elements == 0 {
            return Cow::Borrowed(&[]);
        }
        if self.is_contiguous() {
            return Cow::Borrowed(&storage[begin..][..self.elements * width]);
        }
        let mut bytes = Vec::with_capacity(self.elements * width);
        let mut index = vec![0; self.shape.len()];
        let mut at = self.offset;
        for _ in 0..self.elements {
            bytes.extend_from_slice(&storage[at * width..][..width]);
            // Counts up like an odometer, the last dimension fastest.
            for ((index, &side), &stride) in index.iter_mut().zip(&self.shape).zip(&self.strides).rev() {
                *index += 1;
                at += stride;
                if *index < side {
                    break;
                }
                at -= stride * side;
                *index = 0;
            }
        }
        Cow::Owned(bytes)
    }

    fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.shape.iter().zip(&self.strides).rev().all(|(&side, &stride)| {
            let as_expected = side == 1 || stride == expected;
            expected *= side;
            as_expected
        })
    }
}

/// A shape or strides: whole numbers that are not negative.
fn numbers(sizes: Value<'_>) -> Result<Vec<usize>, TensorFault> {
    let sizes = sizes.items().ok_or(TensorFault::Malformed)?;
    if sizes.len() > MAX_RANK {
        return Err(TensorFault::Rank(sizes.len()));
    }
    let number = |size: Value<'_>| size.int().and_then(|size| usize::try_from(size).ok());
    sizes.map(number).collect::<Option<_>>().ok_or(TensorFault::Malformed)
}
