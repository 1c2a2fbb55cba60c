//! States, inputs and outputs: in the plan's types, and for the host as the numbers that the executor computes with.

use super::operand::own;
use super::{Executor, Which};
use crate::kernels::Float;
use crate::memory::View;
use crate::steps::{load, store};
use graph::plan::{Place, PlanValue};
use graph::random::{Sequence, initial};
use graph::{COPY, DType, Held, Init, Program, Role, State, StateId, Type};
use std::borrow::Cow;
use std::ops::Range;

impl<T: Float> Executor<T> {
    /// An input of a plan, to be filled before it runs. None if it is stored in another type: see
    /// [`write_input`](Executor::write_input).
    pub fn input(&mut self, which: Which, name: &str) -> Option<&mut [T]> {
        // SAFETY: `&mut self` for as long as the slice lives.
        self.own_view(which, name).map(|view| unsafe { view.write() })
    }

    /// Fills an input of a plan, each number rounded to the type that it is stored in. Whether there is one of that name and
    /// length.
    pub fn write_input(&mut self, which: Which, name: &str, values: &[T]) -> bool {
        let value = self.operand(which, name).filter(|value| value.ty.shape.count() == values.len());
        let Some((dtype, stored)) = value.map(|value| (value.ty.dtype, self.stored(value))) else {
            return false;
        };
        // SAFETY: `&mut self`.
        unsafe { store(values, stored, dtype, 0..values.len()) };
        true
    }

    /// An output of the plan that ran last.
    pub fn output(&self, which: Which, name: &str) -> Option<Cow<'_, [T]>> {
        self.floats(self.operand(which, name)?)
    }

    pub(super) fn own_view(&self, which: Which, name: &str) -> Option<View<T>> {
        let value = self.operand(which, name).filter(|value| value.ty.dtype == own::<T>())?;
        Some(self.stored(value).cast(value.ty.shape.count()))
    }

    /// Bytes of a value.
    pub(super) fn stored(&self, value: &PlanValue) -> View<u8> {
        match value.place {
            Place::Arena(offset) => self.arena.view(offset, value.ty.bytes()),
            Place::State(state) => {
                let stored = self.states[state.index()];
                self.unfinished.finish_in(stored);
                stored
            }
        }
    }

    /// A value of whole numbers.
    pub(crate) fn whole_numbers(&self, value: &PlanValue) -> &[i32] {
        // SAFETY: as in `numbers`.
        unsafe { self.stored(value).cast(value.ty.shape.count()).read() }
    }

    /// A value in double precision, whatever is computed in.
    pub(crate) fn sums(&self, value: &PlanValue) -> &[f64] {
        // SAFETY: as in `numbers`.
        unsafe { self.stored(value).cast(value.ty.shape.count()).read() }
    }

    /// A value of floats.
    pub(crate) fn floats(&self, value: &PlanValue) -> Option<Cow<'_, [T]>> {
        let is_float = !matches!(value.ty.dtype, DType::I32 | DType::U8);
        is_float.then(|| self.numbers(value.ty.shape.count(), value.ty.dtype, self.stored(value)))
    }

    /// Stored numbers: in place, if they are of the executor's own type, else a copy.
    fn numbers(&self, count: usize, dtype: DType, stored: View<u8>) -> Cow<'_, [T]> {
        // SAFETY: nothing runs while `&self` is held, since `run` takes `&mut self`.
        unsafe {
            if dtype == own::<T>() {
                return Cow::Borrowed(stored.cast(count).read());
            }
            let mut values = vec![T::ZERO; count];
            load(stored, dtype, 0..count, &mut values);
            Cow::Owned(values)
        }
    }

    pub fn find_state(&self, name: &str) -> Option<StateId> {
        self.program.states.iter().position(|s| s.name == name).map(|i| StateId(i as u32))
    }

    /// A state, or of one that ranks divide what this rank [holds](Executor::held).
    pub fn state(&self, id: StateId) -> Cow<'_, [T]> {
        let (stored, dtype) = (self.states[id.index()], self.program.states[id.index()].ty.dtype);
        self.unfinished.finish_in(stored);
        self.numbers(stored.len() / dtype.bytes(), dtype, stored)
    }

    /// The elements of a state that this rank holds: all, unless it is a tensor in a shard.
    pub fn held(&self, id: StateId) -> Range<usize> {
        let Program { states, last, .. } = &self.program;
        states[id.index()].elements_of(states, last.mesh, self.rank()).0
    }

    /// A state to change where it lies. None if it is stored in another type, or in a shard: see
    /// [`write_state`](Executor::write_state).
    pub fn state_mut(&mut self, id: StateId) -> Option<&mut [T]> {
        self.unfinished.finish();
        let State { ty: Type { dtype, shape }, held, .. } = &self.program.states[id.index()];
        self.stale = true;
        let is_here = *dtype == own::<T>() && !matches!(held, Held::Of { .. });
        // SAFETY: `&mut self` for as long as the slice lives.
        is_here.then(|| unsafe { self.states[id.index()].cast(shape.count()).write() })
    }

    /// Sets a state, each number rounded to the type that it is stored in; of a tensor in a shard, what this rank holds. Copies in half
    /// precision follow: before the next run, or at once where no rank has all that they are copies of.
    ///
    /// # Panics
    /// If it has another number of elements.
    pub fn write_state(&mut self, id: StateId, values: &[T]) {
        self.unfinished.finish();
        let State { name, ty: Type { dtype, shape }, held, .. } = &self.program.states[id.index()];
        assert_eq!(values.len(), shape.count(), "{name}");
        let here = &values[self.held(id)];
        // SAFETY: `&mut self`.
        unsafe { store(here, self.states[id.index()], *dtype, 0..here.len()) };
        let copy = self.find_state(&format!("{name}{COPY}"));
        if let (Held::Of { .. }, Some(copy)) = (held, copy) {
            self.write_state(copy, values);
        }
        self.stale = true;
    }

    /// Sets a state to what these bytes are.
    ///
    /// # Panics
    /// If it has another number of bytes.
    pub fn write_bytes(&mut self, id: StateId, bytes: &[u8]) {
        self.unfinished.finish();
        // SAFETY: `&mut self`.
        unsafe { self.states[id.index()].write() }.copy_from_slice(bytes);
        self.stale = true;
    }

    pub(super) fn initialise(&mut self, seed: u64) {
        for index in 0..self.program.states.len() {
            let state = &self.program.states[index];
            let values = match state.role {
                Role::Parameter(init) => {
                    Some(initial_values(init, state.ty.shape.count(), Sequence::new(seed, index as u32)))
                }
                _ => self.program.first_values(state),
            };
            if let Some(values) = values {
                let values: Vec<T> = values.into_iter().map(T::from_f64).collect();
                self.write_state(StateId(index as u32), &values);
            }
        }
        self.reset_averages();
    }

    /// Makes every moving average equal to its parameter: for whoever sets parameters from outside.
    pub fn reset_averages(&mut self) {
        self.derive(|state| state.averages());
        self.stale = true;
    }

    /// Makes every copy in half precision equal to its parameter, if states were written.
    pub(super) fn refresh(&mut self) {
        if std::mem::take(&mut self.stale) {
            self.derive(|state| state.copies());
        }
    }

    /// Sets every state that is named after another to what that holds, where this rank has it: see
    /// [`write_state`](Executor::write_state) for copies of what it hasn't.
    fn derive(&mut self, of: impl Fn(&graph::State) -> Option<&str>) {
        self.unfinished.finish();
        for (index, state) in self.program.states.iter().enumerate() {
            if let Some(source) = of(state).and_then(|name| self.find_state(name)) {
                let (values, here) = (self.state(source), self.held(source));
                let wanted = self.held(StateId(index as u32));
                if wanted.start < here.start || wanted.end > here.end {
                    continue;
                }
                let values = &values[wanted.start - here.start..wanted.end - here.start];
                // SAFETY: `&mut self`, and states don't overlap.
                unsafe { store(values, self.states[index], state.ty.dtype, 0..values.len()) };
            }
        }
    }
}

fn initial_values(init: Init, count: usize, mut random: Sequence) -> Vec<f64> {
    (0..count).map(|_| initial(init, &mut random)).collect()
}
