//! Launches for the driver: function, packed arguments, encoded tensor maps.

use crate::action::{Address, Arg, HeadMap, Launch, TensorMap};
use crate::driver::{Stream, check};
use crate::error::CudaError;
use crate::modules::{Function, Modules};
use cudarc::driver::sys;
use graph::DType;
use std::ffi::c_void;

/// Prepared launch. Valid as long as the modules live.
pub struct Ready {
    function: Function,
    grid: [u32; 3],
    block: u32,
    shared: u32,
    args: Vec<Value>,
}

impl Ready {
    pub fn new(launch: &Launch, modules: &mut Modules) -> Result<Self, CudaError> {
        let function = modules.function(launch)?;
        let args = launch.args.iter().map(value).collect::<Result<_, _>>()?;
        Ok(Ready { function, grid: launch.grid, block: launch.block, shared: launch.shared, args })
    }

    /// Enqueues it on a stream.
    pub fn start(&self, stream: &Stream, doing: impl FnOnce() -> String) -> Result<(), CudaError> {
        let mut at: Vec<*mut c_void> = self.args.iter().map(Value::address).collect();
        let [x, y, z] = self.grid;
        let (raw, block, shared) = (self.function.raw, self.block, self.shared);
        // SAFETY: the arguments are as many and as large as the kernel takes, which `steps/` sees to; they are read before the
        // call returns.
        let result = unsafe {
            let (params, extra) = (at.as_mut_ptr(), std::ptr::null_mut());
            sys::cuLaunchKernel(raw, x, y, z, block, 1, 1, shared, stream.raw, params, extra)
        };
        check(result, doing)
    }
}

/// Packed argument of a kernel.
enum Value {
    /// Word with the argument at its start.
    Word(u64),
    Tensor(Box<Encoded>),
}

/// Encoded [`TensorMap`].
#[repr(align(64))]
struct Encoded(sys::CUtensorMap);

impl Value {
    fn address(&self) -> *mut c_void {
        match self {
            Value::Word(word) => std::ptr::from_ref(word).cast_mut().cast(),
            Value::Tensor(encoded) => std::ptr::from_ref(&**encoded).cast_mut().cast(),
        }
    }
}

fn value(arg: &Arg) -> Result<Value, CudaError> {
    match arg {
        Arg::Tensor(map) => Ok(Value::Tensor(Box::new(matrix(map)?))),
        Arg::Heads(map) => Ok(Value::Tensor(Box::new(heads(map)?))),
        other => Ok(Value::Word(word(other))),
    }
}

fn matrix(map: &TensorMap) -> Result<Encoded, CudaError> {
    let TensorMap { matrix, box_rows, box_columns, swizzled } = *map;
    let sizes = [matrix.columns as u64, matrix.rows as u64];
    let strides = [(matrix.stride * matrix.dtype.bytes()) as u64];
    encode(matrix.address, matrix.dtype, sizes, &strides, [box_columns, box_rows], swizzled)
}

fn heads(map: &HeadMap) -> Result<Encoded, CudaError> {
    let HeadMap { address, dtype, sizes: [batch, tokens, heads, head], rows } = *map;
    let row = head * dtype.bytes();
    let strides = [row, heads * row, tokens * heads * row].map(|bytes| bytes as u64);
    let sizes = [head, heads, tokens, batch].map(|size| size as u64);
    encode(address, dtype, sizes, &strides, [64, 1, rows, 1], true)
}

/// Axes from the innermost on; strides in bytes, of all but the innermost.
fn encode<const AXES: usize>(
    address: Address,
    dtype: DType,
    sizes: [u64; AXES],
    strides: &[u64],
    boxes: [u32; AXES],
    swizzled: bool,
) -> Result<Encoded, CudaError> {
    debug_assert_eq!(strides.len() + 1, AXES);
    let element = match dtype {
        DType::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        _ => return Err(CudaError::Misuse(format!("no tensor map for {dtype}"))),
    };
    let swizzle = match swizzled {
        true => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        false => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
    };
    let steps = [1u32; AXES];
    let mut encoded = Encoded(sys::CUtensorMap { opaque: [0; 16] });
    // SAFETY: the lists have as many numbers as a map of so many axes takes, and live through the call.
    let result = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut encoded.0,
            element,
            AXES as u32,
            address as *mut c_void,
            sizes.as_ptr(),
            strides.as_ptr(),
            boxes.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    check(result, || format!("describing a tensor of {sizes:?}, innermost axis first"))?;
    Ok(encoded)
}

/// Packs an argument into the low bytes of a word.
fn word(arg: &Arg) -> u64 {
    match *arg {
        Arg::Pointer(address) => address,
        Arg::I32(x) => u64::from(x as u32),
        Arg::U32(x) => u64::from(x),
        Arg::I64(x) => x as u64,
        Arg::F32(x) => u64::from(x.to_bits()),
        Arg::F64(x) => x.to_bits(),
        Arg::Tensor(_) | Arg::Heads(_) => unreachable!("a tensor map is no word"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_lie_in_the_low_bytes_of_their_words() {
        assert_eq!(word(&Arg::I32(-1)).to_le_bytes()[..4], (-1i32).to_le_bytes());
        assert_eq!(word(&Arg::F32(1.5)).to_le_bytes()[..4], 1.5f32.to_le_bytes());
        assert_eq!(word(&Arg::F64(-2.5)).to_le_bytes(), (-2.5f64).to_le_bytes());
        assert_eq!(word(&Arg::Pointer(7)), 7);
    }
}
