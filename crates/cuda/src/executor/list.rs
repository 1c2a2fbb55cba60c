//! A bound plan, ready to be played: every kernel found, every product's algorithm chosen.

use crate::action::{Action, Address, Arg, Launch, Product, TensorMap};
use crate::bind::{Bound, Placed};
use crate::driver::{Block, Context, Event, Graph, Stream, check};
use crate::error::CudaError;
use crate::modules::{Function, Modules};
use crate::product::{Choice, Products, describe};
use crate::tuner::{Bench, Tuner};
use cudarc::driver::sys;
use graph::{DType, Lane, Plan};
use std::ffi::c_void;
use std::sync::Arc;

/// One stream for each lane, in their order.
pub(super) struct Streams([Stream; 3]);

impl Streams {
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        Ok(Streams([Stream::new(context)?, Stream::new(context)?, Stream::new(context)?]))
    }

    pub fn of(&self, lane: Lane) -> &Stream {
        match lane {
            Lane::Compute => &self.0[0],
            Lane::Comm => &self.0[1],
            Lane::Copy => &self.0[2],
        }
    }

    pub fn compute(&self) -> &Stream {
        &self.0[0]
    }

    pub fn copy(&self) -> &Stream {
        &self.0[2]
    }

    pub fn synchronise(&self, doing: &str) -> Result<(), CudaError> {
        self.0.iter().try_for_each(|stream| stream.synchronise(|| doing.to_string()))
    }
}

pub(super) enum Work {
    Launch { function: Function, grid: [u32; 3], block: u32, shared: u32, args: Vec<Value> },
    Product(Product, Choice),
    Copy { from: Address, to: Address, bytes: usize },
    Zero { at: Address, bytes: usize },
}

pub(super) struct Prepared {
    pub work: Work,
    pub lane: Lane,
    waits: Vec<usize>,
    /// Recorded after it, where another lane waits for it.
    signal: Option<Event>,
    pub step: usize,
    pub first: usize,
    /// A kernel's name or a product's shape.
    pub what: String,
    pub layer: String,
}

/// Another lane's way into a list and back.
struct Branch {
    lane: Lane,
    end: Event,
}

pub(super) struct List {
    pub name: String,
    pub actions: Vec<Prepared>,
    /// Of every value of the plan.
    pub addresses: Vec<Address>,
    start: Event,
    branches: Vec<Branch>,
    /// Made when the list is first run.
    pub graph: Option<Graph>,
}

/// What preparing a list takes.
pub(super) struct Preparer<'a> {
    pub context: &'a Arc<Context>,
    pub modules: &'a mut Modules,
    pub products: &'a Products,
    pub tuner: &'a mut Tuner,
    pub streams: &'a Streams,
    /// Where products may write while they are measured.
    pub scratch: &'a Block,
}

impl Preparer<'_> {
    pub fn prepare(&mut self, plan: &Plan, name: &str, bound: Bound) -> Result<List, CudaError> {
        let waited: std::collections::HashSet<usize> =
            bound.actions.iter().flat_map(|placed| placed.waits.iter().copied()).collect();
        let mut actions = Vec::with_capacity(bound.actions.len());
        for (index, placed) in bound.actions.into_iter().enumerate() {
            let signal = waited.contains(&index).then(|| Event::new(self.context)).transpose()?;
            let layer = plan.steps.get(placed.step).map_or_else(String::new, |step| step.layer.clone());
            actions.push(self.action(placed, signal, layer)?);
        }
        let mut branches = Vec::new();
        for lane in [Lane::Comm, Lane::Copy] {
            if actions.iter().any(|action: &Prepared| action.lane == lane) {
                branches.push(Branch { lane, end: Event::new(self.context)? });
            }
        }
        let start = Event::new(self.context)?;
        Ok(List { name: name.to_string(), actions, addresses: bound.addresses, start, branches, graph: None })
    }

    fn action(
        &mut self,
        placed: Placed,
        signal: Option<Event>,
        layer: String,
    ) -> Result<Prepared, CudaError> {
        let Placed { action, lane, step, first, waits } = placed;
        let (work, what) = match action {
            Action::Launch(launch) => {
                let function = self.modules.function(&launch)?;
                let Launch { kernel, grid, block, shared, args } = launch;
                let args = args.iter().map(value).collect::<Result<_, _>>()?;
                (Work::Launch { function, grid, block, shared, args }, kernel.name)
            }
            Action::Product(product) => {
                let (products, stream, scratch) = (self.products, self.streams.compute(), self.scratch);
                let choice = self.tuner.choose(&product, &Bench { products, stream, scratch })?;
                (Work::Product(product, choice), describe(&product))
            }
            Action::Copy { from, to, bytes } => (Work::Copy { from, to, bytes }, "copy".into()),
            Action::Zero { at, bytes } => (Work::Zero { at, bytes }, "zero".into()),
        };
        Ok(Prepared { work, lane, waits, signal, step, first, what, layer })
    }
}

/// An argument as a kernel gets it.
pub(super) enum Value {
    /// At the start of a word.
    Word(u64),
    Tensor(Box<Encoded>),
}

/// What the driver makes of a [`TensorMap`].
#[repr(align(64))]
pub(super) struct Encoded(sys::CUtensorMap);

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
        Arg::Tensor(map) => Ok(Value::Tensor(Box::new(encode(map)?))),
        other => Ok(Value::Word(word(other))),
    }
}

fn encode(map: &TensorMap) -> Result<Encoded, CudaError> {
    let TensorMap { matrix, box_rows, box_columns, swizzled } = *map;
    let dtype = match matrix.dtype {
        DType::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        _ => return Err(CudaError::Misuse(format!("no tensor map for {}", matrix.dtype))),
    };
    let swizzle = match swizzled {
        true => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        false => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
    };
    let sizes = [matrix.columns as u64, matrix.rows as u64];
    let strides = [(matrix.stride * matrix.dtype.bytes()) as u64];
    let (boxes, steps) = ([box_columns, box_rows], [1u32, 1]);
    let mut encoded = Encoded(sys::CUtensorMap { opaque: [0; 16] });
    // SAFETY: the lists have as many numbers as a map of two axes takes, and live through the call.
    let result = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut encoded.0,
            dtype,
            2,
            matrix.address as *mut c_void,
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
    check(result, || format!("describing a matrix of {} × {}", matrix.rows, matrix.columns))?;
    Ok(encoded)
}

/// An argument in the low bytes of a word, where C finds it.
fn word(arg: &Arg) -> u64 {
    match *arg {
        Arg::Pointer(address) => address,
        Arg::I32(x) => u64::from(x as u32),
        Arg::U32(x) => u64::from(x),
        Arg::I64(x) => x as u64,
        Arg::F32(x) => u64::from(x.to_bits()),
        Arg::F64(x) => x.to_bits(),
        Arg::Tensor(_) => unreachable!("a tensor map is no word"),
    }
}

impl Prepared {
    /// Puts the work into a stream, whichever lane it is of.
    pub fn start(&self, products: &Products, stream: &Stream) -> Result<(), CudaError> {
        match &self.work {
            Work::Launch { function, grid, block, shared, args } => {
                let mut at: Vec<*mut c_void> = args.iter().map(Value::address).collect();
                let [x, y, z] = *grid;
                // SAFETY: the arguments are as many and as large as the kernel takes, which `steps/` sees to; they are read
                // before the call returns.
                let result = unsafe {
                    let (params, extra) = (at.as_mut_ptr(), std::ptr::null_mut());
                    let raw = function.raw;
                    sys::cuLaunchKernel(raw, x, y, z, *block, 1, 1, *shared, stream.raw, params, extra)
                };
                check(result, || format!("launching {} of {}", self.what, self.layer))
            }
            Work::Product(product, choice) => {
                products.run(product, choice, stream).map_err(|error| match error {
                    CudaError::Product { doing, status } => {
                        CudaError::Product { doing: format!("{doing} of {}", self.layer), status }
                    }
                    other => other,
                })
            }
            Work::Copy { from, to, bytes } => stream.copy(*from, *to, *bytes),
            Work::Zero { at, bytes } => stream.zero(*at, *bytes),
        }
    }
}

impl List {
    /// Puts all actions into the streams of their lanes. Other lanes start after what the compute lane holds, and the
    /// compute lane goes on after them.
    pub fn play(&self, products: &Products, streams: &Streams) -> Result<(), CudaError> {
        if !self.branches.is_empty() {
            self.start.record(streams.compute())?;
        }
        for Branch { lane, .. } in &self.branches {
            streams.of(*lane).wait(&self.start)?;
        }
        for action in &self.actions {
            let stream = streams.of(action.lane);
            for signal in action.waits.iter().filter_map(|wait| self.actions[*wait].signal.as_ref()) {
                stream.wait(signal)?;
            }
            action.start(products, stream)?;
            if let Some(signal) = &action.signal {
                signal.record(stream)?;
            }
        }
        for Branch { lane, end } in &self.branches {
            end.record(streams.of(*lane))?;
            streams.compute().wait(end)?;
        }
        Ok(())
    }

    /// Launches the list as one graph.
    pub fn launch(&mut self, products: &Products, streams: &Streams) -> Result<(), CudaError> {
        if self.actions.is_empty() {
            return Ok(());
        }
        let graph = match self.graph.take() {
            Some(graph) => graph,
            None => streams.compute().capture(|| self.play(products, streams), &self.name)?,
        };
        let launched = streams.compute().launch(&graph, &self.name);
        self.graph = Some(graph);
        launched
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
