//! The language in which an op is described: named slots for operands and results, shapes in letters.
//!
//! A shape is written as its axes: `"B,T,3C"`. A letter (or a word) stands for a length: the first operand that has it
//! binds it, and whoever has it too must agree. `3C` is three times C; a number is itself; `..` is any number of axes, the
//! same ones wherever it stands; `*I` is all that follows, I being its count; `?` is any length. `"*"` alone is any shape.

use crate::op::Lane;
use crate::types::{DType, Shape, Type};

/// Precision class of a value, from which its dtype under mixed precision follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Operands and results of matmuls: half precision. All such operands of a step have one dtype.
    Compute,
    /// The residual stream and its gradient, which have a dtype of their own.
    Stream,
    /// An operand in whatever precision it is: kernels read both.
    Float,
    /// Parameters, moments, sums: never half precision.
    Full,
    /// A parameter's gradient: full precision, unless a plan wants it in compute precision.
    Gradient,
    /// The dtype of that operand.
    Like(usize),
    /// A bias: the dtype of what it is added to, the first result.
    LikeResult,
    /// A sum of two values: compute precision if both are, else that of the stream.
    Joined,
    /// Value that passes through a branch unchanged; a gradient that leaves the stream for a branch becomes one of
    /// compute precision.
    Branch,
    /// The dtype of the state that an assign writes.
    State,
    /// A half-precision copy, bf16 or f16.
    Half,
    /// A number of 8 bits, of which scales are kept.
    Fp8,
    /// Fixed dtype: whole numbers, bytes, results of conversions.
    Exactly(DType),
}

/// One operand or result.
#[derive(Clone, Debug)]
pub struct Slot {
    /// Name of an operand in messages; ending of the name of a result. Results named `#` are numbered.
    pub name: &'static str,
    /// Precision class.
    pub class: Class,
    axes: Axes,
    /// The operand that a result may be written over.
    pub over: Option<usize>,
}

impl Slot {
    /// True for slots of any number of rows, which is the same for all such slots.
    pub fn has_rows(&self) -> bool {
        matches!(self.axes, Axes::Letters(letters) if letters.starts_with(".."))
    }
}

#[derive(Clone, Debug)]
enum Axes {
    Letters(&'static str),
    /// A shape that is an attribute of the op, and must be one of these letters.
    Given(Shape, &'static str),
    /// The shape of that operand.
    Of(usize),
}

type Rule = Box<dyn Fn(&Letters<'_>) -> Result<usize, String>>;

/// Everything about an op that doesn't depend on the sizes of its operands.
pub struct Description {
    /// Operands, in order.
    pub operands: Vec<Slot>,
    /// Results, in order.
    pub results: Vec<Slot>,
    /// Queue that its steps run on.
    pub lane: Lane,
    /// Flag of matmuls and convolutions: what "matmuls alone" in the benchmarks means.
    pub multiplies: bool,
    letters: Vec<(&'static str, usize)>,
    /// Letters that follow from those of the operands, or a reason why they can't.
    rules: Vec<(&'static str, Rule)>,
}

impl Description {
    /// An op without operands and results.
    pub fn none() -> Self {
        Description {
            operands: vec![],
            results: vec![],
            lane: Lane::Compute,
            multiplies: false,
            letters: vec![],
            rules: vec![],
        }
    }

    /// One more operand.
    pub fn takes(mut self, name: &'static str, letters: &'static str, class: Class) -> Self {
        self.operands.push(Slot { name, class, axes: Axes::Letters(letters), over: None });
        self
    }

    /// One more operand, if `there`.
    pub fn takes_if(self, there: bool, name: &'static str, letters: &'static str, class: Class) -> Self {
        if there { self.takes(name, letters, class) } else { self }
    }

    /// `count` more operands of any shapes.
    pub fn takes_any(mut self, count: usize, name: &'static str, class: Class) -> Self {
        for _ in 0..count {
            self = self.takes(name, "*", class);
        }
        self
    }

    /// One more operand, of a shape that is an attribute of the op.
    pub fn takes_shape(mut self, name: &'static str, shape: &Shape, class: Class) -> Self {
        self.operands.push(Slot { name, class, axes: Axes::Given(shape.clone(), "*"), over: None });
        self
    }

    /// One more operand, of the shape of another.
    pub fn takes_like(mut self, operand: usize, name: &'static str, class: Class) -> Self {
        self.operands.push(Slot { name, class, axes: Axes::Of(operand), over: None });
        self
    }

    /// One more result.
    pub fn gives(mut self, name: &'static str, letters: &'static str, class: Class) -> Self {
        self.results.push(Slot { name, class, axes: Axes::Letters(letters), over: None });
        self
    }

    /// One more result, if `there`.
    pub fn gives_if(self, there: bool, name: &'static str, letters: &'static str, class: Class) -> Self {
        if there { self.gives(name, letters, class) } else { self }
    }

    /// One more result, of a shape that is an attribute of the op and fits the letters.
    pub fn gives_shape(
        mut self,
        name: &'static str,
        shape: &Shape,
        letters: &'static str,
        class: Class,
    ) -> Self {
        self.results.push(Slot { name, class, axes: Axes::Given(shape.clone(), letters), over: None });
        self
    }

    /// One more result, of the shape of an operand.
    pub fn gives_like(mut self, operand: usize, name: &'static str, class: Class) -> Self {
        self.results.push(Slot { name, class, axes: Axes::Of(operand), over: None });
        self
    }

    /// Lets the last result be written over an operand. An executor that finds the two in different places copies first and
    /// then works in place, so that `place` is free to decide.
    pub fn over(mut self, operand: usize) -> Self {
        if let Some(slot) = self.results.last_mut() {
            slot.over = Some(operand);
        }
        self
    }

    /// Adds [`over`](Self::over), if `there`.
    pub fn over_if(self, there: bool, operand: usize) -> Self {
        if there { self.over(operand) } else { self }
    }

    /// A letter that an attribute of the op fixes.
    pub fn with(mut self, letter: &'static str, length: usize) -> Self {
        self.letters.push((letter, length));
        self
    }

    /// A letter that follows from those of the operands.
    pub fn set(
        mut self,
        letter: &'static str,
        rule: impl Fn(&Letters<'_>) -> Result<usize, String> + 'static,
    ) -> Self {
        self.rules.push((letter, Box::new(rule)));
        self
    }

    /// Adds a rule that must hold of the operands, or gives the reason why it doesn't.
    pub fn check(self, rule: impl Fn(&Letters<'_>) -> Result<(), String> + 'static) -> Self {
        self.set("", move |letters| rule(letters).map(|()| 0))
    }

    /// Puts the op on the lane of collectives.
    pub fn communicates(mut self) -> Self {
        self.lane = Lane::Comm;
        self
    }

    /// Marks a matmul or a convolution.
    pub fn multiplies(mut self) -> Self {
        self.multiplies = true;
        self
    }

    /// The types of the results, in the precision of the operands.
    pub fn infer(&self, operands: &[&Type]) -> Result<Vec<Type>, String> {
        self.types(operands, None)
    }

    /// The types of the results of a step whose dtypes were declared: those, where this op may give them.
    pub fn infer_as(&self, operands: &[&Type], declared: &[DType]) -> Result<Vec<Type>, String> {
        self.types(operands, Some(declared))
    }

    fn types(&self, operands: &[&Type], declared: Option<&[DType]>) -> Result<Vec<Type>, String> {
        if operands.len() != self.operands.len() {
            return Err(format!("takes {} operands, got {}", self.operands.len(), operands.len()));
        }
        let mut letters = Letters::new(&self.letters, operands);
        for (slot, ty) in self.operands.iter().zip(operands) {
            letters.take(slot, &ty.shape, ty)?;
        }
        let dtypes = self.dtypes(operands)?;
        for (letter, rule) in &self.rules {
            let length = rule(&letters)?;
            letters.bind(letter, length, "the op", None)?;
        }
        let mut results = Vec::with_capacity(self.results.len());
        for (index, slot) in self.results.iter().enumerate() {
            let own = dtypes.of_result(slot.class);
            let declared = declared.and_then(|list| list.get(index).copied());
            let dtype = declared.filter(|dtype| dtypes.may_give(slot.class, *dtype)).unwrap_or(own);
            results.push(Type { dtype, shape: letters.shape_of(slot)? });
        }
        Ok(results)
    }

    /// Looks whether the dtypes of the operands go together.
    fn dtypes<'a>(&self, operands: &'a [&'a Type]) -> Result<Dtypes<'a>, String> {
        let mut compute = None;
        let mut wide = None;
        for (slot, ty) in self.operands.iter().zip(operands) {
            let fits = match slot.class {
                Class::Exactly(dtype) => ty.dtype == dtype,
                Class::Half => ty.dtype.is_half(),
                Class::Fp8 => ty.dtype.is_fp8(),
                Class::Full => ty.dtype.is_float() && !ty.dtype.is_half(),
                Class::State => true,
                Class::Like(operand) => ty.dtype == operands[operand].dtype,
                _ => ty.dtype.is_float(),
            };
            if !fits {
                return Err(format!("{} can't be {ty}", slot.name));
            }
            if slot.class == Class::Compute && *compute.get_or_insert(ty.dtype) != ty.dtype {
                return Err(format!("needs operands of one dtype, but {} is {ty}", slot.name));
            }
            // Half precision goes with f32; f64 with nothing else.
            let computes = ty.dtype.is_float() && !matches!(slot.class, Class::Exactly(_) | Class::State);
            if computes && *wide.get_or_insert(ty.dtype == DType::F64) != (ty.dtype == DType::F64) {
                return Err(format!("{} is {ty}: f64 goes with f64 alone", slot.name));
            }
        }
        Ok(Dtypes { operands, compute })
    }
}

/// The dtypes of a step's operands.
struct Dtypes<'a> {
    operands: &'a [&'a Type],
    /// Dtype of its operands of compute precision.
    compute: Option<DType>,
}

impl Dtypes<'_> {
    fn base(&self) -> DType {
        self.operands.first().map_or(DType::F32, |ty| ty.dtype)
    }

    /// The dtype of a result where precision is not mixed.
    fn of_result(&self, class: Class) -> DType {
        match class {
            Class::Exactly(dtype) => dtype,
            Class::Like(operand) => self.operands[operand].dtype,
            Class::Full | Class::Gradient if self.base() == DType::F64 => DType::F64,
            Class::Full | Class::Gradient => DType::F32,
            _ => self.base(),
        }
    }

    /// Checks whether a kernel may write a result as this dtype under mixed precision: compute precision as its
    /// operands of that class, or wider; the stream in any.
    fn may_give(&self, class: Class, dtype: DType) -> bool {
        let goes_along = dtype.is_float() && (dtype == DType::F64) == (self.base() == DType::F64);
        let as_operands = self.compute.is_none_or(|compute| dtype == compute || !dtype.is_half());
        match class {
            Class::Compute | Class::Gradient => goes_along && as_operands,
            Class::Stream | Class::Joined | Class::Branch => goes_along,
            _ => false,
        }
    }
}

/// Lengths that letters stand for in one step.
pub struct Letters<'a> {
    operands: &'a [&'a Type],
    bound: Vec<Bound>,
    /// The axes that `..` stands for.
    rest: Option<(Vec<usize>, String)>,
}

struct Bound {
    letter: &'static str,
    length: usize,
    /// Slot that bound it, for messages.
    by: String,
}

impl<'a> Letters<'a> {
    fn new(given: &[(&'static str, usize)], operands: &'a [&'a Type]) -> Self {
        let bound =
            given.iter().map(|(letter, length)| Bound { letter, length: *length, by: "the op".into() });
        Letters { operands, bound: bound.collect(), rest: None }
    }

    /// The length that a letter stands for; 0 for one that nobody bound.
    pub fn get(&self, letter: &str) -> usize {
        self.bound.iter().find(|b| b.letter == letter).map_or(0, |b| b.length)
    }

    /// The type of one operand.
    pub fn operand(&self, index: usize) -> &Type {
        self.operands[index]
    }

    /// The types of all operands.
    pub fn operands(&self) -> &[&Type] {
        self.operands
    }

    /// Number of axes that `..` stands for.
    pub fn leading(&self) -> usize {
        self.rest.as_ref().map_or(0, |(axes, _)| axes.len())
    }

    fn bind(
        &mut self,
        letter: &'static str,
        length: usize,
        by: &str,
        ty: Option<&Type>,
    ) -> Result<(), String> {
        if letter.is_empty() || letter == "?" {
            return Ok(());
        }
        let by = ty.map_or_else(|| by.to_string(), |ty| format!("{by} {ty}"));
        match self.bound.iter().find(|b| b.letter == letter) {
            Some(b) if b.length != length => {
                Err(format!("{letter} is {} in {}, but {length} in {by}", b.length, b.by))
            }
            Some(_) => Ok(()),
            None => {
                self.bound.push(Bound { letter, length, by });
                Ok(())
            }
        }
    }

    /// Matches an operand, or the given shape of a result.
    fn take(&mut self, slot: &Slot, shape: &Shape, ty: &Type) -> Result<(), String> {
        let letters = match &slot.axes {
            Axes::Letters(letters) => letters,
            Axes::Given(given, letters) => {
                require(shape == given, || format!("{} is {ty}, but needs the shape {given}", slot.name))?;
                letters
            }
            Axes::Of(operand) => {
                let of = &self.operands[*operand].shape;
                let same = shape == of;
                return require(same, || format!("{} is {ty}, but needs the shape {of}", slot.name));
            }
        };
        if *letters == "*" {
            return Ok(());
        }
        let axes = &shape.0[..];
        let wrong = || format!("{} is {ty}, not ({letters})", slot.name);
        let (before, after) = around_rest(letters);
        let all = tokens(before).count() + after.map_or(0, |after| tokens(after).count());
        let spread = tokens(before).last().is_some_and(|token| token.starts_with('*'));
        let fits = match after {
            Some(_) => axes.len() >= all,
            None if spread => axes.len() + 1 >= all,
            None => axes.len() == all,
        };
        require(fits, wrong)?;
        let count = tokens(before).count();
        for (i, token) in tokens(before).enumerate() {
            let length = match token.strip_prefix('*') {
                Some(_) => axes[i..].iter().product(),
                None => axes[i],
            };
            self.take_axis(token.trim_start_matches('*'), length, slot, ty)?;
        }
        let Some(after) = after else { return Ok(()) };
        let start = axes.len() - tokens(after).count();
        for (token, length) in tokens(after).zip(&axes[start..]) {
            self.take_axis(token, *length, slot, ty)?;
        }
        let rest = axes[count..start].to_vec();
        match &self.rest {
            Some((axes, by)) if *axes != rest => Err(format!("{} is {ty}, but {by}", slot.name)),
            Some(_) => Ok(()),
            None => {
                self.rest = Some((rest, format!("{} {ty}", slot.name)));
                Ok(())
            }
        }
    }

    fn take_axis(
        &mut self,
        token: &'static str,
        length: usize,
        slot: &Slot,
        ty: &Type,
    ) -> Result<(), String> {
        let (factor, letter) = factor(token);
        let fits = if letter.is_empty() { length == factor } else { length.is_multiple_of(factor) };
        require(fits, || format!("{} is {ty}: an axis of {length} is not {token}", slot.name))?;
        self.bind(letter, length / factor.max(1), slot.name, Some(ty))
    }

    fn shape_of(&mut self, slot: &Slot) -> Result<Shape, String> {
        match &slot.axes {
            Axes::Of(operand) => Ok(self.operands[*operand].shape.clone()),
            Axes::Given(shape, _) => {
                let ty = Type { dtype: DType::F32, shape: shape.clone() };
                self.take(slot, shape, &ty)?;
                Ok(shape.clone())
            }
            Axes::Letters(letters) => {
                let (before, after) = around_rest(letters);
                let length = |token: &'static str| {
                    let (factor, letter) = factor(token);
                    if letter.is_empty() { factor } else { factor * self.get(letter) }
                };
                let rest = self.rest.iter().flat_map(|(axes, _)| axes).filter(|_| after.is_some());
                let axes = tokens(before).map(length).chain(rest.copied());
                Ok(Shape(axes.chain(tokens(after.unwrap_or("")).map(length)).collect()))
            }
        }
    }
}

/// The axes before and after `..`, if there is one.
fn around_rest(letters: &'static str) -> (&'static str, Option<&'static str>) {
    match letters.split_once("..") {
        Some((before, after)) => (before, Some(after)),
        None => (letters, None),
    }
}

fn tokens(letters: &'static str) -> impl Iterator<Item = &'static str> {
    letters.split(',').filter(|token| !token.is_empty())
}

/// `3C` is three times C; a token without a letter is a number.
fn factor(token: &'static str) -> (usize, &'static str) {
    let digits = token.len() - token.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    (token[..digits].parse().unwrap_or(1), &token[digits..])
}

/// An error with this reason unless something holds.
pub fn require(holds: bool, why: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(why()) }
}
