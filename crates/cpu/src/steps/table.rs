//! The one table of kernels: for each op, what runs its steps and the working memory that needs. The compiler asks it how much
//! memory a node wants, binding refuses what is not in it, and a run calls what was bound: the three can't disagree.

use super::{
    Context, attention, batch_norm, channels, conv, convert, fp8, linear, loss, maps, muon, position_bias,
    prepare, random, reduce, resize, resized_loss, rows, tokens, update, windows,
};
use crate::kernels::Float;
use graph::fp8::Format;
use graph::{DType, Graph, Op, Shape, Type};

/// Kernel of an op with its attributes, for given shapes.
pub(crate) struct Kernel<T> {
    /// Bytes of working memory.
    pub scratch: usize,
    /// Flag: it takes operands and results in the type they are stored in. Others see all floats as `T`.
    pub reads_stored: bool,
    /// Flag: it takes, or leaves, sums in f64 in whatever type it computes.
    pub takes_doubles: bool,
    run: Run<T>,
}

type Run<T> = Box<dyn Fn(&Context<'_, T>) + Send + Sync>;

impl<T: Float> Kernel<T> {
    /// Kernel without working memory.
    fn new(run: impl Fn(&Context<'_, T>) + Send + Sync + 'static) -> Self {
        Kernel { scratch: 0, reads_stored: false, takes_doubles: false, run: Box::new(run) }
    }

    /// Adds working memory of so many numbers.
    fn elements(self, count: usize) -> Self {
        self.bytes(count * size_of::<T>())
    }

    /// Adds working memory of so many sums in f64.
    fn doubles(self, count: usize) -> Self {
        self.bytes(count * size_of::<f64>())
    }

    fn bytes(mut self, bytes: usize) -> Self {
        self.scratch += bytes;
        self
    }

    /// Kernel of collectives, which the communicator runs.
    pub fn none() -> Self {
        Kernel::new(|_| {}).of_any_type().with_doubles()
    }

    fn with_doubles(mut self) -> Self {
        self.takes_doubles = true;
        self
    }

    fn of_any_type(mut self) -> Self {
        self.reads_stored = true;
        self
    }

    /// # Safety
    /// Conditions of [`super::run`].
    pub unsafe fn run(&self, cx: &Context<'_, T>) {
        (self.run)(cx);
    }
}

/// The types of a step's operands and results.
pub(crate) struct Types<'a> {
    pub inputs: Vec<&'a Type>,
    pub outputs: Vec<&'a Type>,
}

impl Types<'_> {
    fn input(&self, i: usize) -> &Shape {
        &self.inputs[i].shape
    }

    fn output(&self, i: usize) -> &Shape {
        &self.outputs[i].shape
    }
}

/// A kernel that calls a function of a module with the step and these attributes.
macro_rules! call {
    ($module:ident::$function:ident $(, $attribute:expr)*) => {
        // SAFETY: each function relies on just what the caller of `Kernel::run` promises.
        Kernel::new(move |cx| unsafe { $module::$function(cx $(, $attribute)*) })
    };
}

/// The kernel for the steps of `op`, if there is one.
pub(crate) fn kernel<T: Float>(op: &Op, types: &Types<'_>, threads: usize) -> Option<Kernel<T>> {
    let (x, y) = (|i: usize| types.input(i), |i: usize| types.output(i));
    let partials = |shape: &Shape| reduce::partial_elements(shape);
    let kernel =
        match *op {
            // ---- the border of a graph
            Op::Assign { .. } => call!(convert::cast).of_any_type(),
            Op::Seed { .. } => call!(rows::seed),

            // ---- ViT
            Op::Prepare { .. } => call!(prepare::prepare),
            Op::Patches { patch } => call!(tokens::patches, patch),
            Op::Unpatches { patch, .. } => call!(tokens::unpatches, patch),
            Op::Linear { bias, gelu } => call!(linear::forward, bias, gelu),
            Op::LinearGradX { gelu: true } => {
                call!(linear::grad_x, true).elements(linear::bias_scratch(y(0)))
            }
            Op::LinearGradX { gelu: false } => call!(linear::grad_x, false),
            Op::LinearGradW { accumulate, .. } => {
                call!(linear::grad_w, accumulate).elements(linear::gradient_scratch(x(0), x(1).last()))
            }
            Op::ColumnSum { accumulate } => call!(reduce::column_sum, accumulate).elements(partials(x(0))),
            Op::Gelu => call!(rows::gelu),
            Op::GeluGrad { bias: true } => call!(reduce::gelu_grad, true).elements(partials(x(0))),
            Op::GeluGrad { bias: false } => call!(reduce::gelu_grad, false),
            Op::SwiGlu => call!(rows::swiglu),
            Op::SwiGluGrad { sum } => {
                let sums = if sum { partials(x(0)) } else { 0 };
                call!(reduce::swiglu_grad, sum).elements(sums)
            }
            Op::LayerScale => call!(rows::layer_scale),
            Op::LayerScaleGrad { sum } => {
                call!(reduce::layer_scale_grad, sum).elements((1 + usize::from(sum)) * partials(x(0)))
            }
            Op::Prepend => call!(tokens::prepend),
            Op::TokenSum { start, tokens } => call!(tokens::token_sum, start, tokens),
            Op::Embed { class_token } => call!(tokens::embed, class_token),
            Op::EmbedGrad { class_token } => call!(tokens::embed_grad, class_token),
            Op::LayerNorm { eps, add } => call!(rows::layer_norm, eps, add),
            Op::LayerNormGrad { add, sum, .. } => {
                call!(reduce::layer_norm_grad, add, sum).elements((2 + usize::from(sum)) * partials(x(0)))
            }
            Op::Attention { heads, drop } => call!(attention::forward, heads, drop)
                .elements(attention::forward_scratch(x(0), heads, threads)),
            Op::AttentionGrad { heads, drop, sum: false } => call!(attention::backward, heads, drop)
                .elements(attention::backward_scratch(x(0), heads, threads)),
            Op::AttentionGrad { heads, drop, sum: true } => {
                let own = attention::backward_scratch(x(0), heads, threads);
                Kernel::new(move |cx| {
                    // SAFETY: passed on to the caller; the sums lie behind what attention works on.
                    unsafe {
                        attention::backward(cx, heads, drop);
                        if !cx.matmuls_only {
                            let scratch = cx.scratch();
                            let sums = scratch.part(own..scratch.len());
                            reduce::column_sums(cx, cx.output(0), sums, &cx.step.outputs[1..2], None);
                        }
                    }
                })
                .elements(own + partials(x(0)))
            }
            Op::Drop { rate, site, per } => call!(random::drop, rate, site, per),
            Op::Add => call!(rows::add),
            Op::Scale { factor } => call!(rows::scale, factor),
            Op::Pool { kind } => call!(tokens::pool, kind),
            Op::PoolGrad { kind, .. } => call!(tokens::pool_grad, kind),
            Op::Reshape { .. } => call!(maps::reshape),
            Op::CrossEntropy { smoothing, mixed } => {
                call!(loss::cross_entropy, smoothing, mixed).bytes(loss::scratch(x(0)))
            }
            Op::CrossEntropyGrad { smoothing, mixed } => call!(loss::cross_entropy_grad, smoothing, mixed),

            // ---- Swin Transformer V2
            Op::WindowAttention { heads, windows } => call!(windows::forward, heads, windows)
                .elements(windows::scratch_elements(op, types.inputs[0], threads)),
            Op::WindowAttentionGrad { heads, windows } => call!(windows::backward, heads, windows)
                .elements(windows::scratch_elements(op, types.inputs[0], threads)),
            Op::PositionBias { window, pretrained } => call!(position_bias::forward, window, pretrained)
                .elements(position_bias::scratch_elements(op, types.inputs[2], threads)),
            Op::PositionBiasGrad { window, pretrained } => call!(position_bias::backward, window, pretrained)
                .elements(position_bias::scratch_elements(op, types.inputs[2], threads)),
            Op::NormAdd { eps, drop, .. } => call!(maps::norm_add, eps, drop),
            Op::NormAddGrad { drop } => call!(reduce::norm_add_grad, drop).elements(2 * partials(x(0))),
            Op::MergePatches => call!(maps::merge_patches),
            Op::SplitPatches { .. } => call!(maps::split_patches),

            // ---- accumulation and update
            Op::Accumulate => call!(rows::accumulate),
            Op::AddUp { ref starts } => {
                let starts = starts.clone();
                // SAFETY: as all others.
                Kernel::new(move |cx| unsafe { rows::add_up(cx, &starts) })
            }
            Op::SumSquares { ref flats } => {
                let chunks = update::Chunks::of(flats);
                // SAFETY: as all others.
                Kernel::new(move |cx| unsafe { update::sum_squares(cx, &chunks) }).with_doubles()
            }
            Op::Clip { max_norm, scaled } => call!(update::clip, max_norm, scaled).with_doubles(),
            Op::Advance => call!(update::advance),
            Op::AdamW { .. } => call!(update::adamw),
            Op::Sgd { .. } => call!(update::sgd),
            Op::LambMoments { ref flat, .. } => {
                let segments = update::Segments::of(flat);
                // SAFETY: as all others.
                Kernel::new(move |cx| unsafe { update::lamb_moments(cx, &segments) }).with_doubles()
            }
            Op::LambApply { ref flat, .. } => {
                let segments = update::Segments::of(flat);
                // SAFETY: as all others.
                Kernel::new(move |cx| unsafe { update::lamb_apply(cx, &segments) }).with_doubles()
            }
            Op::MuonMomentum { ref flat, ref stacks, .. } => {
                let matrices = muon::Matrices::of(flat, stacks);
                // SAFETY: as all others.
                Kernel::new(move |cx| unsafe { muon::momentum(cx, &matrices) })
            }
            Op::MuonApply { ref flat, ref stacks, .. } => {
                let matrices = muon::Matrices::of(flat, stacks);
                // SAFETY: as all others.
                Kernel::new(move |cx| unsafe { muon::apply(cx, &matrices) })
            }
            Op::Matmul { left_transposed, right_transposed } => {
                call!(muon::matmul, left_transposed, right_transposed)
            }
            Op::UnitTrace { eps } => call!(muon::unit_trace, eps),
            Op::NewtonSchulz { coefficients } => call!(muon::newton_schulz, coefficients),
            Op::Ema { decay } => call!(update::ema, decay),
            Op::LossScale { window, hysteresis, min } => call!(update::loss_scale, window, hysteresis, min),
            Op::Commit => call!(batch_norm::commit),

            // ---- on the way to other ranks
            Op::Pack { .. } => call!(convert::pack).of_any_type(),
            Op::Unpack { .. } => call!(convert::unpack).of_any_type(),
            Op::Cast { .. } => call!(convert::cast).of_any_type(),

            // ---- matmuls in fp8
            Op::Quantize { transposed, accumulate, .. } => call!(fp8::quantize, transposed, accumulate),
            Op::ScaledMatmul { bias, accumulate, .. } => call!(fp8::scaled_matmul, bias, accumulate)
                .elements(if accumulate { y(0).count() } else { 0 }),
            Op::Rescale { to, margin } => {
                let largest = Format::of(to)?.largest();
                call!(fp8::rescale, largest, margin)
            }

            // ---- dense prediction
            Op::Conv { window, bias } => {
                call!(conv::forward, window, bias).elements(conv::forward_scratch::<T>(x(1), y(0), threads))
            }
            Op::ConvGradX { window, .. } => {
                call!(conv::grad_x, window).elements(conv::grad_x_scratch::<T>(x(1), y(0), threads))
            }
            Op::ConvGradW { window, ref shape, accumulate } => call!(conv::grad_w, window, accumulate)
                .elements(conv::grad_w_scratch::<T>(x(0), shape, threads)),
            Op::Moments => call!(batch_norm::moments).doubles(batch_norm::sums_scratch(x(0))),
            Op::JoinMoments => call!(batch_norm::join_moments),
            Op::BatchNorm { eps, relu, running } => {
                call!(batch_norm::forward, eps, relu, running).doubles(batch_norm::coefficients_scratch(x(0)))
            }
            Op::BatchNormSums { eps, relu } => {
                call!(batch_norm::sums, eps, relu).doubles(batch_norm::sums_scratch(x(0)))
            }
            Op::BatchNormGrad { eps, relu } => {
                call!(batch_norm::grad, eps, relu).doubles(batch_norm::coefficients_scratch(x(0)))
            }
            Op::RunningMoments { momentum } => call!(batch_norm::running_moments, momentum),
            Op::Resize { sampling, .. } => call!(resize::resize, sampling, false)
                .bytes(resize::scratch::<T>(x(0), y(0), sampling, false, threads)),
            Op::ResizeGrad { sampling, .. } => call!(resize::resize, sampling, true)
                .bytes(resize::scratch::<T>(x(0), y(0), sampling, true, threads)),
            Op::ResizedCrossEntropy { smoothing } => {
                call!(resized_loss::forward, smoothing).bytes(resized_loss::scratch(x(0), x(1), threads))
            }
            Op::ResizedCrossEntropyGrad { smoothing } => {
                call!(resized_loss::backward, smoothing).bytes(resized_loss::scratch(x(0), x(1), threads))
            }
            Op::Concat => call!(channels::concat),
            Op::Slice { start, .. } => call!(channels::slice, start),
            Op::Grid { .. } => call!(channels::grid),
            Op::Ungrid { .. } => call!(channels::ungrid),

            // No steps, or the communicator's.
            Op::Input | Op::Read { .. } => return None,
            Op::AllReduce { .. } | Op::ReduceScatter { .. } | Op::AllGather { .. } => return None,
        };
    Some(kernel)
}

/// CPU of so many threads, as a target of plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Threads of the rank.
    pub threads: usize,
}

impl graph::Target for Target {
    fn linger(&self) -> usize {
        if self.threads > 1 { crate::executor::LINGER } else { 0 }
    }

    fn scratch(&self, graph: &Graph, node: usize) -> usize {
        let (node, threads) = (&graph.nodes[node], self.threads);
        let list = |values: &[graph::ValueId]| values.iter().map(|v| graph.ty(*v)).collect();
        let types = Types { inputs: list(&node.inputs), outputs: list(&node.outputs) };
        let doubles = types.inputs.iter().chain(&types.outputs).any(|ty| ty.dtype == DType::F64);
        let bytes = if doubles {
            kernel::<f64>(&node.op, &types, threads).map(|kernel| kernel.scratch)
        } else {
            kernel::<f32>(&node.op, &types, threads).map(|kernel| kernel.scratch)
        };
        bytes.unwrap_or(0)
    }
}
