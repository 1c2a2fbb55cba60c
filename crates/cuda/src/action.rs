//! Actions of the GPU: the flat list that a plan becomes.
//!
//! Nothing here touches a GPU. The executor plays these lists, tests look at them.

use crate::error::CudaError;
use comm::ElementType;
use graph::op::Window;
use graph::{DType, Group, Op, Shape};

/// An address in the GPU's memory.
pub type Address = u64;

/// Declares [`Source`]: the purpose of each, its name, its file, and roughly how many hundredths of a second NVRTC 13 takes for an instance on
/// one core, for Hopper.
macro_rules! sources {
    ($($(#[$doc:meta])* $name:ident = $file:literal, $effort:literal;)*) => {
        /// A source of kernels.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Source {
            $($(#[$doc])* $name,)*
        }

        impl Source {
            /// Approximate time to compile an instance, in hundredths of a second.
            pub fn effort(self) -> usize {
                match self {
                    $(Source::$name => $effort,)*
                }
            }

            /// File name, for messages.
            pub fn file(self) -> &'static str {
                match self {
                    $(Source::$name => $file,)*
                }
            }

            pub fn text(self) -> &'static str {
                match self {
                    $(Source::$name => include_str!(concat!("../kernels/", $file)),)*
                }
            }
        }
    };
}

sources! {
    /// Attention in half precision by tensor cores, forward and backward.
    Attention = "attention.cu", 200;
    /// Attention by Hopper's warpgroups.
    AttentionHopper = "attention_hopper.cu", 200;
    /// Its backward.
    AttentionHopperGrad = "attention_hopper_grad.cu", 200;
    /// Attention over any number of tokens by Hopper's warpgroups.
    AttentionFlash = "attention_flash.cu", 120;
    /// Its backward.
    AttentionFlashGrad = "attention_flash_grad.cu", 200;
    /// First and last kernels of its backward.
    AttentionFlashEnds = "attention_flash_ends.cu", 30;
    /// Its backward where heads are few.
    AttentionSides = "attention_sides.cu", 100;
    /// Sums that cuDNN's attention doesn't compute.
    AttentionSums = "attention_sums.cu", 8;
    /// Attention without tensor cores.
    AttentionPlain = "attention_plain.cu", 200;
    /// Attention of f32, rounded to tf32.
    AttentionTf32 = "attention_tf32.cu", 200;
    /// Attention in windows in half precision by tensor cores.
    Windows = "windows.cu", 100;
    /// Its backward, in windows of up to 64 tokens.
    WindowsGrad = "windows_grad.cu", 100;
    /// Its backward, in wider windows.
    WindowsWide = "windows_wide.cu", 100;
    /// Attention in windows without tensor cores.
    WindowsPlain = "windows_plain.cu", 100;
    /// The continuous position bias.
    PositionBias = "position_bias.cu", 20;
    /// The residual after a norm.
    NormAdd = "norm_add.cu", 20;
    /// Ops that only move tokens of a map.
    Maps = "maps.cu", 8;
    /// LayerScale and SwiGLU.
    Scaling = "scaling.cu", 20;
    /// Row-wise and elementwise ops: norms, GELU, sums over columns, additions, dropout, casts.
    Rows = "rows.cu", 20;
    /// Conversion of bytes to images.
    Prepare = "prepare.cu", 8;
    /// Ops between images, patches and tokens.
    Tokens = "tokens.cu", 8;
    /// Cross-entropy.
    Loss = "loss.cu", 15;
    /// Cross-entropy of pixels whose logits are resized.
    ResizedLoss = "resized_loss.cu", 15;
    /// Cross-entropy of pixels whose logits are enlarged, cell by cell.
    ResizedLossCells = "resized_loss_cells.cu", 40;
    /// Moments, batch norm and its gradient.
    BatchNorm = "batch_norm.cu", 15;
    /// Resizing and pooling of images.
    Resize = "resize.cu", 15;
    /// Ops on channels: biases of convolutions, dropout of channels, concatenation and splitting.
    Channels = "channels.cu", 8;
    /// Gradient norm, clipping, optimizers.
    Update = "update.cu", 37;
    /// Matmuls with a fused bias or GELU. Hopper only.
    Matmul = "matmul.cu", 140;
    /// Small weight gradients, several in one launch. Hopper only.
    Weights = "weights.cu", 30;
    /// Copies into and out of a run.
    Moves = "moves.cu", 8;
    /// Time stamps.
    Clock = "clock.cu", 8;
}

/// Headers of the kernels, by the name in `#include`.
pub const HEADERS: [(&str, &str); 18] = [
    ("common.cuh", include_str!("../kernels/common.cuh")),
    ("axis.cuh", include_str!("../kernels/axis.cuh")),
    ("attention.cuh", include_str!("../kernels/attention.cuh")),
    ("attention_mma.cuh", include_str!("../kernels/attention_mma.cuh")),
    ("attention_tiles.cuh", include_str!("../kernels/attention_tiles.cuh")),
    ("flash.cuh", include_str!("../kernels/flash.cuh")),
    ("flash_grad.cuh", include_str!("../kernels/flash_grad.cuh")),
    ("flash_grad_tile.cuh", include_str!("../kernels/flash_grad_tile.cuh")),
    ("hopper.cuh", include_str!("../kernels/hopper.cuh")),
    ("loss.cuh", include_str!("../kernels/loss.cuh")),
    ("matrix.cuh", include_str!("../kernels/matrix.cuh")),
    ("pipeline.cuh", include_str!("../kernels/pipeline.cuh")),
    ("plain.cuh", include_str!("../kernels/plain.cuh")),
    ("norm.cuh", include_str!("../kernels/norm.cuh")),
    ("sums.cuh", include_str!("../kernels/sums.cuh")),
    ("warpgroup.cuh", include_str!("../kernels/warpgroup.cuh")),
    ("windows.cuh", include_str!("../kernels/windows.cuh")),
    ("windows_tiles.cuh", include_str!("../kernels/windows_tiles.cuh")),
];

/// One instance of a kernel's template.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Kernel {
    pub source: Source,
    /// A C++ expression, such as `layer_norm<float, bf16, 768>`.
    pub name: String,
}

impl Kernel {
    pub fn new(source: Source, name: impl Into<String>) -> Self {
        Kernel { source, name: name.into() }
    }
}

/// Parameter of a kernel, with C's size and alignment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    Pointer(Address),
    I32(i32),
    U32(u32),
    I64(i64),
    F32(f32),
    F64(f64),
    /// A CUtensorMap by value: 128 bytes, aligned to 64.
    Tensor(TensorMap),
    /// A CUtensorMap of heads by value.
    Heads(HeadMap),
}

/// Matrix for Hopper's copy engine (TMA): boxes of it are copied to and from shared memory, where a box's rows are 128 bytes or
/// less and, if `swizzled`, the 16-byte units of row i lie in the order j ^ (i % 8). Made by cuTensorMapEncodeTiled with rank
/// 2, no interleaving, L2 promotion of 256 bytes and zeros outside.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TensorMap {
    pub matrix: Matrix,
    pub box_rows: u32,
    pub box_columns: u32,
    pub swizzled: bool,
}

/// Heads for Hopper's copy engine (TMA): (batch, tokens, heads, head size), half precision. Boxes of `rows` tokens and 64
/// elements of one head go to shared memory, swizzled as those of a [`TensorMap`]; zeros stand for what lies outside the tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadMap {
    pub address: Address,
    pub dtype: DType,
    /// Batch, tokens, heads, head size.
    pub sizes: [usize; 4],
    pub rows: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    pub kernel: Kernel,
    pub grid: [u32; 3],
    pub block: u32,
    /// Dynamic shared memory, in bytes.
    pub shared: u32,
    pub args: Vec<Arg>,
}

/// Row-major matrix in memory: rows of `columns` elements, `stride` elements apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Matrix {
    pub address: Address,
    pub dtype: DType,
    pub rows: usize,
    pub columns: usize,
    pub stride: usize,
}

impl Matrix {
    pub fn new(address: Address, dtype: DType, rows: usize, columns: usize) -> Self {
        Matrix { address, dtype, rows, columns, stride: columns }
    }
}

/// Operation fused into a matmul.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Epilogue {
    None,
    /// Adds a row of the result's type and width to every row of the result.
    Bias(Address),
}

/// Matmul result = left·right (+ result), each side transposed or not. All row-major.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Matmul {
    pub left: Matrix,
    pub left_transposed: bool,
    pub right: Matrix,
    pub right_transposed: bool,
    pub result: Matrix,
    /// Adds to what the result holds.
    pub accumulate: bool,
    pub epilogue: Epilogue,
    /// f32 operands may be rounded to tf32.
    pub tf32: bool,
}

/// Output of a convolution: one of three tensors, computed from the other two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvOutput {
    /// The convolution itself.
    Y,
    /// Its gradients.
    X,
    Weight,
}

/// Images in memory, channels-last: (B,h,w,C).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Images {
    pub address: Address,
    pub axes: [usize; 4],
}

/// A convolution of x (B,h,w,I) by a weight (O,kh,kw,I) to y (B,h',w',O), or one of its gradients. All are of one type; sums
/// are f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Convolution {
    pub made: ConvOutput,
    pub x: Images,
    pub weight: Address,
    /// (kh, kw)
    pub kernel: [usize; 2],
    pub y: Images,
    pub window: Window,
    pub dtype: DType,
    /// f32 operands may be rounded to tf32.
    pub tf32: bool,
}

impl Convolution {
    /// Address and bytes of the result.
    pub fn result(&self) -> (Address, usize) {
        let elements = |images: &Images| images.axes.iter().product::<usize>();
        let (address, count) = match self.made {
            ConvOutput::Y => (self.y.address, elements(&self.y)),
            ConvOutput::X => (self.x.address, elements(&self.x)),
            ConvOutput::Weight => {
                let [kh, kw] = self.kernel;
                (self.weight, self.y.axes[3] * kh * kw * self.x.axes[3])
            }
        };
        (address, count * self.dtype.bytes())
    }

    /// The same convolution with its result at another address.
    pub fn with_result_at(mut self, address: Address) -> Self {
        match self.made {
            ConvOutput::Y => self.y.address = address,
            ConvOutput::X => self.x.address = address,
            ConvOutput::Weight => self.weight = address,
        }
        self
    }
}

/// Attention of heads in half precision, without dropout, that lie as (B,T,3,H,D) and come out as (B,T,H,D); or its gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionForward {
    pub batch: usize,
    pub tokens: usize,
    pub heads: usize,
    pub head: usize,
    pub dtype: DType,
    pub qkv: Address,
    pub out: Address,
    /// log(Σ exp) of each query's scaled scores: (B,H,T), f32.
    pub log_sums: Address,
    pub gradient: Option<AttentionBackward>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionBackward {
    pub dout: Address,
    pub dqkv: Address,
    /// Scratch memory for one number per query: (B,H,T), f32.
    pub deltas: Address,
}

impl AttentionForward {
    /// Memory ranges that cuDNN writes.
    pub fn results(&self) -> Vec<std::ops::Range<Address>> {
        let AttentionForward { batch, tokens, heads, head, dtype, .. } = *self;
        let (queries, channels) = (batch * heads * tokens, head * dtype.bytes());
        let range = |address: Address, bytes: usize| address..address + bytes as Address;
        match self.gradient {
            None => vec![range(self.out, queries * channels), range(self.log_sums, 4 * queries)],
            Some(of) => vec![range(of.dqkv, 3 * queries * channels), range(of.deltas, 4 * queries)],
        }
    }
}

/// Attention by our kernels or by cuDNN, whichever the tuner chooses.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    pub attended: AttentionForward,
    /// Our kernels, one after the other.
    pub own: Vec<Launch>,
    /// Launches after cuDNN's: sums over tokens.
    pub after: Option<Launch>,
}

/// A collective: the range that a rank sends and the one that it receives, which are the same or disjoint. Both are
/// of one element type; lengths are in elements, padding between neighbours included.
#[derive(Clone, Debug, PartialEq)]
pub struct CollectiveCall {
    /// Ranks that take part.
    pub group: Group,
    pub collective: comm::Collective,
    pub kind: ElementType,
    pub send: (Address, usize),
    pub receive: (Address, usize),
    /// Layers that it is for, such as "blocks.11.mlp.fc2.bias … blocks.10.attn.qkv.weight".
    pub layer: String,
    /// Address of two words for its start and end times, if they are recorded.
    pub times: Option<Address>,
}

impl CollectiveCall {
    /// Bytes that this rank contributes.
    pub fn bytes(&self) -> usize {
        self.send.1 * self.kind.bytes()
    }
}

/// A sum over rows of partial sums, f32, that a kernel has left in the memory for such. Sums of many steps are made by one launch:
/// see [`graph::Op::AddUp`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PartialSum {
    /// The first of its columns.
    pub parts: Address,
    pub rows: usize,
    /// Elements from a row to the next.
    pub stride: usize,
    pub columns: usize,
    /// Initial value of the sum.
    pub start: Option<Address>,
    pub out: Address,
}

impl PartialSum {
    /// Byte range from its first part to the end of its last.
    pub fn range(&self) -> std::ops::Range<Address> {
        let elements = self.rows.saturating_sub(1) * self.stride + self.columns;
        self.parts..self.parts + 4 * elements as Address
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    Launch(Launch),
    Matmul(Matmul),
    Convolution(Convolution),
    Attention(Box<Attention>),
    /// Partial sums that the step leaves to an [`graph::Op::AddUp`]. A bound list has none.
    Sum(PartialSum),
    Copy {
        from: Address,
        to: Address,
        bytes: usize,
    },
    Zero {
        at: Address,
        bytes: usize,
    },
    Collective(CollectiveCall),
}

/// Properties of a GPU on which actions depend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    pub name: String,
    /// Compute capability; (9, 0) for Hopper.
    pub capability: (u32, u32),
    pub processors: u32,
    /// Largest shared memory of a block with opt-in, in bytes.
    pub shared_per_block: u32,
}

impl Facts {
    /// The GPU of the benchmarks.
    pub fn h200() -> Self {
        Facts { name: "NVIDIA H200".into(), capability: (9, 0), processors: 132, shared_per_block: 232_448 }
    }
}

/// Value of a plan with its address on the GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Operand {
    pub address: Address,
    pub dtype: DType,
    pub shape: Shape,
}

/// One step of a plan with operands, addresses and GPU.
pub struct StepContext<'a> {
    pub op: &'a Op,
    pub layer: &'a str,
    pub inputs: &'a [Operand],
    pub outputs: &'a [Operand],
    /// Scratch memory of the step: as many bytes as [`crate::Target`] asked for.
    pub scratch: Address,
    /// Memory of its partial sums. They stay until they are added up.
    pub parts: Address,
    /// Address of the run's `Header`, which `common.cuh` declares.
    pub header: Address,
    /// True if f32 matmuls may round their operands to tf32.
    pub tf32: bool,
    pub facts: &'a Facts,
}

impl StepContext<'_> {
    pub fn input(&self, i: usize) -> &Operand {
        &self.inputs[i]
    }

    pub fn output(&self, i: usize) -> &Operand {
        &self.outputs[i]
    }

    /// Error of an op, or of a combination of types, without a kernel.
    pub fn no_kernel(&self) -> CudaError {
        let types = self.inputs.iter().map(|o| o.dtype.name()).collect::<Vec<_>>().join(", ");
        CudaError::NoKernel { layer: self.layer.to_string(), op: self.op.name(), types }
    }
}

/// Name of an element type in the kernels.
pub fn c_type(dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::F32 => Some("float"),
        DType::Bf16 => Some("bf16"),
        DType::F16 => Some("f16"),
        DType::F64 | DType::E4M3 | DType::E5M2 | DType::I32 | DType::U8 => None,
    }
}

/// Constant tables of kernels, such as the addresses of all parameters. Laid out first, copied to the GPU once.
pub struct Constants {
    base: Address,
    bytes: Vec<u8>,
}

impl Constants {
    /// Starts the tables at the address that [`Self::bytes`] will be copied to, a multiple of 256.
    pub fn at(base: Address) -> Self {
        Constants { base, bytes: Vec::new() }
    }

    /// Adds a table and returns its address, a multiple of 16.
    pub fn put(&mut self, table: &[u8]) -> Address {
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0);
        let address = self.base + self.bytes.len() as Address;
        self.bytes.extend_from_slice(table);
        address
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}
