//! Optimizers, and what ranks communicate.

use crate::flat::{Flat, Stack, Views};
use crate::op::slots::Class::{Exactly, Float, Full, Half, Like};
use crate::op::slots::{Description, require};
use crate::types::{DType, Shape};

/// An op whose operands of n elements are a rank's part of such a buffer.
fn over_flat(flat: &Flat) -> Description {
    let flat = flat.clone();
    Description::none().with("n", flat.held()).check(move |_| flat.check())
}

/// Flat gradients → partial sums.
pub fn sum_squares(flats: &[Flat]) -> Description {
    let chunks = flats.iter().map(Flat::chunks).sum();
    let mut op = Description::none().with("chunks", chunks);
    for flat in flats {
        let (shape, flat) = (Shape::from([flat.held()]), flat.clone());
        op = op.takes_shape("gradient", &shape, Full).check(move |_| flat.check());
    }
    op.gives("", "chunks", Exactly(DType::F64))
}

/// w, dw, moments, control, applied steps [, a copy of w in half precision] → w, moments [, the copy].
pub fn optimizer(moments: &[&'static str], flat: &Flat, operands: usize) -> Description {
    let usual = 4 + moments.len();
    let copies = operands > usual;
    let mut op = over_flat(flat).takes("parameter", "n", Full).takes("gradient", "n", Full);
    for moment in moments {
        op = op.takes(moment, "n", Full);
    }
    op = op
        .takes("control", "3", Full)
        .takes("applied steps", "1", Full)
        .takes_if(copies, "copy", "n", Half)
        .gives("", "n", Full)
        .over(0);
    for (index, moment) in moments.iter().enumerate() {
        op = op.gives(moment, "n", Full).over(2 + index);
    }
    if copies { op.gives("half", "n", Like(usual)).over(usual) } else { op }
}

/// w, dw, m, v, control, applied steps → m, v, sums of squares.
pub fn lamb_moments(flat: &Flat) -> Description {
    over_flat(flat)
        .with("segments", flat.segments().count())
        .takes("parameter", "n", Full)
        .takes("gradient", "n", Full)
        .takes("m", "n", Full)
        .takes("v", "n", Full)
        .takes("control", "3", Full)
        .takes("applied steps", "1", Full)
        .gives("m", "n", Full)
        .over(2)
        .gives("v", "n", Full)
        .over(3)
        .gives("norms", "segments,2", Exactly(DType::F64))
}

/// w, m, v, sums of squares, control, applied steps [, a copy of w] → w [, the copy].
pub fn lamb_apply(flat: &Flat, operands: usize) -> Description {
    let copies = operands > 6;
    let op = over_flat(flat)
        .with("segments", flat.segments().count())
        .takes("parameter", "n", Full)
        .takes("m", "n", Full)
        .takes("v", "n", Full)
        .takes("norms", "segments,2", Exactly(DType::F64))
        .takes("control", "3", Full)
        .takes("applied steps", "1", Full)
        .takes_if(copies, "copy", "n", Half)
        .gives("", "n", Full)
        .over(0);
    if copies { op.gives("half", "n", Like(6)).over(6) } else { op }
}

/// An op over the matrices in a rank's part of such a buffer.
fn over_stacks(flat: &Flat, stacks: &[Stack]) -> Description {
    let (of, stacks) = (flat.clone(), stacks.to_vec());
    over_flat(flat).check(move |_| of.matrices(&stacks).map(|_| ()))
}

fn directions(flat: &Flat, stack: &Stack) -> Shape {
    Shape::from([flat.most(stack), stack.rows, stack.columns])
}

/// dw, momentum, control → momentum, directions of each stack.
pub fn muon_momentum(to: Option<DType>, stacks: &[Stack], flat: &Flat) -> Description {
    let op = over_stacks(flat, stacks)
        .takes("gradient", "n", Full)
        .takes("momentum", "n", Full)
        .takes("control", "3", Full)
        .gives("momentum", "n", Full)
        .over(1);
    let class = to.map_or(Full, Exactly);
    stacks.iter().fold(op, |op, stack| op.gives_shape("direction", &directions(flat, stack), "*", class))
}

/// w, control, directions of each stack [, a copy of w] → w [, the copy].
pub fn muon_apply(stacks: &[Stack], flat: &Flat, operands: usize) -> Description {
    let usual = 2 + stacks.len();
    let copies = operands > usual;
    let op = over_stacks(flat, stacks).takes("parameter", "n", Full).takes("control", "3", Full);
    let op = stacks.iter().fold(op, |op, stack| op.takes_shape("direction", &directions(flat, stack), Float));
    let op = op.takes_if(copies, "copy", "n", Half).gives("", "n", Full).over(0);
    if copies { op.gives("half", "n", Like(usual)).over(usual) } else { op }
}

/// n values of which there are parts, sums so far of some → n sums.
pub fn add_up(starts: &[usize], operands: usize) -> Description {
    let values = operands.saturating_sub(starts.len()).max(1);
    let starts = starts.to_vec();
    let mut op = Description::none().takes_any(values, "parts", Full);
    for of in &starts {
        op = op.takes_like((*of).min(values - 1), "sum so far", Full);
    }
    for value in 0..values {
        let start = starts.iter().position(|of| *of == value);
        op = op.gives_like(value, "#", Full);
        op = op.over_if(start.is_some(), values + start.unwrap_or(0));
    }
    let numbers =
        starts.windows(2).all(|pair| pair[0] < pair[1]) && starts.last().is_none_or(|of| *of < values);
    op.check(move |_| require(numbers, || format!("has no {values} sums that {starts:?} are numbers of")))
}

/// control, n old values, n new values → n values.
pub fn commit(operands: usize) -> Description {
    let values = (operands.max(3) - 1) / 2;
    let mut op = Description::none().takes("control", "3", Full);
    op = op.takes_any(values, "value before", Full);
    for value in 0..values {
        op = op.takes_like(1 + value, "value after", Full);
    }
    (0..values).fold(op, |op, value| op.gives_like(1 + value, "#", Full).over(1 + value))
}

/// A value of any shape, and others of its dtype.
fn alike(count: usize) -> Description {
    Description::none().takes_any(1, "value", Float).takes_any(count.max(1) - 1, "value", Like(0))
}

pub fn pack(align: usize, to: Option<DType>, operands: usize) -> Description {
    alike(operands)
        .set("n", move |l| {
            require(align > 0, || "can't align to 0".into())?;
            let count: usize = l.operands().iter().map(|t| t.shape.count()).sum();
            Ok(count.next_multiple_of(align))
        })
        .gives("", "n", to.map_or(Like(0), Exactly))
}

pub fn unpack(shapes: &[Shape], to: Option<DType>, over: bool) -> Description {
    let class = to.map_or(Like(0), Exactly);
    let count: usize = shapes.iter().map(Shape::count).sum();
    let mut op = Description::none().takes("flat", "*", Float);
    if over {
        op = op.takes_any(shapes.len(), "value", class);
        let shapes = shapes.to_vec();
        op = op.check(move |l| {
            let fits = shapes.iter().eq(l.operands()[1..].iter().map(|t| &t.shape));
            require(fits, || "writes over values of other shapes than it unpacks".into())
        });
    }
    op = op.check(move |l| {
        let flat = l.operand(0);
        require(count <= flat.shape.count(), || format!("{count} elements don't fit in {flat}"))
    });
    let values = shapes.iter().enumerate();
    values.fold(op, |op, (index, shape)| op.gives_shape("#", shape, "*", class).over_if(over, 1 + index))
}

pub fn all_reduce(operands: usize) -> Description {
    let values = 0..operands.max(1);
    values.fold(alike(operands), |op, value| op.gives_like(value, "#", Like(0)).over(value)).communicates()
}

/// Tensors in a flat buffer of so many elements, which ranks divide.
fn check_views(op: Description, views: &Views, ranks: usize) -> Description {
    let views = views.clone();
    op.check(move |_| views.check(ranks))
}

pub fn reduce_scatter(ranks: usize, views: Option<&Views>) -> Description {
    let Some(views) = views else {
        return Description::none()
            .takes("flat", "n", Float)
            .set("part", move |l| {
                let n = l.get("n");
                require(ranks > 0 && n % ranks == 0, || {
                    format!("{n} elements don't divide among {ranks} ranks")
                })?;
                Ok(n / ranks)
            })
            .gives("", "part", Like(0))
            .communicates();
    };
    let mut op = Description::none();
    for (number, shape) in views.shapes.iter().enumerate() {
        op = op.takes_shape("value", shape, if number == 0 { Float } else { Like(0) });
    }
    let op = check_views(op, views, ranks).with("part", views.elements / ranks.max(1));
    op.gives("", "part", Like(0)).communicates()
}

pub fn all_gather(ranks: usize, views: Option<&Views>) -> Description {
    let op = Description::none().takes("part", "n,..", Float);
    let Some(views) = views else {
        return op.set("all", move |l| Ok(l.get("n") * ranks)).gives("", "all,..", Like(0)).communicates();
    };
    let elements = views.elements;
    let op = check_views(op, views, ranks).check(move |l| {
        let n = l.operand(0).shape.count();
        require(n * ranks == elements, || format!("{n} elements of {ranks} ranks are not {elements}"))
    });
    views.shapes.iter().fold(op, |op, shape| op.gives_shape("#", shape, "*", Like(0))).communicates()
}
