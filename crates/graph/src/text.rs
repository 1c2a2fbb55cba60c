//! Plans as text, printed and parsed. One line per step:
//!
//! ```text
//! 4 compute norm1 f32[8,65,192] @1024, norm1.mean f32[8,65] @0 = layer_norm(x, $norm1.weight) eps=1e-6
//!     wait=3 scratch=64@2048 ; forward blocks.0.norm1 # 3.2 MFLOP 1.6 MB
//! ```
//!
//! (on one line). A value is declared with its type and place where it is made; `$name` is a state, declared at the top, with
//! its place: `@0` in the arena, `own@0` in the states' own memory, `host@0` in the host's. Behind it stands what a rank holds, if not
//! all: `/shard=data:2` a part of a buffer that is nowhere whole, `/within=data:2` a part of the buffer that begins there, `/of=NAME+64` what
//! the shard of that name has of a tensor. What follows `#` is computed by the printer and skipped by the parser, which finds a place in the
//! states' own memory for states without one.

use crate::graph::{Graph, Held, Home, Phase, Role, State, ValueId, settle};
use crate::mesh::Mesh;
use crate::op::{Lane, Op, StateId};
use crate::plan::{Key, Place, Plan, PlanValue, ScratchRange, Step};
use crate::types::Type;
use std::collections::HashMap;
use std::fmt::{self, Write as _};

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Key { batch, height, width } = self.key;
        let mesh = if self.mesh == Mesh::default() { String::new() } else { format!(" mesh={}", self.mesh) };
        let sizes = format!("batch={batch} height={height} width={width}");
        writeln!(f, "plan {} {sizes}{mesh} arena={}", self.name, self.arena)?;
        for state in self.used_states() {
            let State { name, ty, role, home, held } = &self.states[state];
            let home = match home {
                Home::Nowhere => String::new(),
                Home::Arena(offset) => format!(" @{offset}"),
                Home::Own(offset) => format!(" own@{offset}"),
                Home::Host(offset) => format!(" host@{offset}"),
            };
            let held = match held {
                Held::Whole => String::new(),
                Held::Shard(group) => format!("/shard={group}"),
                Held::Within(group) => format!("/within={group}"),
                Held::Of { flat, start } => format!("/of={}+{start}", self.states[flat.index()].name),
            };
            writeln!(f, "state {name} {ty} {}{home}{held}", json(role))?;
        }
        for value in &self.inputs {
            writeln!(f, "input {}", self.declared(*value))?;
        }
        for (i, step) in self.steps.iter().enumerate() {
            writeln!(f, "{}", self.step_text(i, step))?;
        }
        for value in &self.outputs {
            writeln!(f, "output {}", self.used(*value))?;
        }
        Ok(())
    }
}

impl Plan {
    /// The states that steps touch, and of a flat buffer the tensors in it.
    fn used_states(&self) -> Vec<usize> {
        let mut used = vec![false; self.states.len()];
        for value in &self.values {
            if let Place::State(state) = value.place {
                used[state.index()] = true;
            }
        }
        for step in &self.steps {
            if let Op::Assign { state } = step.op {
                used[state.index()] = true;
            }
            step.after.iter().for_each(|state| used[state.index()] = true);
        }
        let is_flat = |index: &usize| used[*index] && self.states[*index].role == Role::Flat;
        let flats: Vec<usize> = (0..used.len()).filter(is_flat).collect();
        let lies_in =
            |index: usize, flat: usize| self.states[index].lies_in(&self.states[flat], StateId(flat as u32));
        let in_flat = |index: usize| flats.iter().any(|flat| lies_in(index, *flat));
        let mut states: Vec<usize> =
            (0..used.len()).filter(|index| used[*index] || in_flat(*index)).collect();
        // A tensor names the shard that it is in, which is declared before.
        states.sort_by_key(|index| matches!(self.states[*index].held, Held::Of { .. }));
        states
    }

    fn used(&self, value: usize) -> String {
        match self.values[value].place {
            Place::State(state) => format!("${}", self.states[state.index()].name),
            Place::Arena(_) => self.values[value].name.clone(),
        }
    }

    fn declared(&self, value: usize) -> String {
        let PlanValue { name, ty, place } = &self.values[value];
        match place {
            Place::State(state) => format!("${}", self.states[state.index()].name),
            Place::Arena(offset) => format!("{name} {ty} @{offset}"),
        }
    }

    fn step_text(&self, index: usize, step: &Step) -> String {
        let inputs: Vec<_> = step.inputs.iter().map(|v| self.used(*v)).collect();
        let outputs = step.outputs.iter().map(|v| self.declared(*v)).collect();
        let mut line = format!("{index} {}", step.lane.name());
        let _ = write!(line, " {}", call(&step.op, outputs, &inputs, &self.states));
        if step.joined {
            line.push_str(" joined");
        }
        if !step.waits.is_empty() {
            let waits: Vec<_> = step.waits.iter().map(ToString::to_string).collect();
            let _ = write!(line, " wait={}", waits.join(","));
        }
        if step.left {
            line.push_str(" left");
        }
        if !step.after.is_empty() {
            let after: Vec<_> = step.after.iter().map(|s| self.states[s.index()].name.as_str()).collect();
            let _ = write!(line, " after={}", after.join(","));
        }
        if let Some(ScratchRange { offset, bytes }) = step.scratch {
            let _ = write!(line, " scratch={bytes}@{offset}");
        }
        if let Some(ScratchRange { offset, bytes }) = step.parts {
            let _ = write!(line, " parts={bytes}@{offset}");
        }
        let cost = self.cost_of(step);
        let _ = write!(line, " ; {} {}", step.phase.name(), step.layer);
        let _ = write!(line, " # {:.3} MFLOP {:.3} MB", cost.flops / 1e6, cost.bytes / 1e6);
        line
    }
}

/// Prints a graph like the text of a plan, without places, lanes and waits.
impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let declared = |value: &ValueId| format!("{} {}", self.name(*value), self.ty(*value));
        for node in &self.nodes {
            match node.op {
                Op::Input => writeln!(f, "input {}", declared(&node.outputs[0]))?,
                Op::Read { state } => writeln!(f, "state {}", self.states[state.index()].name)?,
                _ => {}
            }
        }
        let steps = self.nodes.iter().filter(|node| !matches!(node.op, Op::Input | Op::Read { .. }));
        for (index, node) in steps.enumerate() {
            let inputs: Vec<&str> = node.inputs.iter().map(|value| self.name(*value)).collect();
            let outputs: Vec<String> = node.outputs.iter().map(declared).collect();
            let call = call(&node.op, outputs, &inputs, &self.states);
            writeln!(f, "{index} {call} ; {} {}", node.phase.name(), node.layer)?;
        }
        self.outputs.iter().try_for_each(|value| writeln!(f, "output {}", self.name(*value)))
    }
}

/// `results = op(operands) attributes`.
fn call<I: AsRef<str>>(op: &Op, mut outputs: Vec<String>, inputs: &[I], states: &[State]) -> String {
    let inputs: Vec<&str> = inputs.iter().map(AsRef::as_ref).collect();
    let (name, mut attributes) = op.name_and_attributes();
    if let Op::Assign { state } = op {
        outputs.push(format!("${}", states[state.index()].name));
        attributes.clear();
    }
    let mut text = format!("{} = {name}({})", outputs.join(", "), inputs.join(", "));
    for (key, value) in attributes {
        let _ = write!(text, " {key}={value}");
    }
    text
}

fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// Defect of a plan's text.
#[derive(Debug, thiserror::Error, PartialEq)]
#[error("plan text, line {line}: {why}")]
pub struct ParseError {
    /// Number of the line, from 1.
    pub line: usize,
    /// Defect.
    pub why: String,
}

impl std::str::FromStr for Plan {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Plan, ParseError> {
        let mut parser = Parser::default();
        for (i, line) in text.lines().enumerate() {
            let content = line.split(" # ").next().unwrap_or("").trim();
            if content.is_empty() || content.starts_with('#') {
                continue;
            }
            parser.line(content).map_err(|why| ParseError { line: i + 1, why })?;
        }
        settle(&mut parser.plan.states);
        Ok(parser.plan)
    }
}

#[derive(Default)]
struct Parser {
    plan: Plan,
    values: HashMap<String, usize>,
    states: HashMap<String, StateId>,
}

impl Parser {
    fn line(&mut self, line: &str) -> Result<(), String> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "plan" => self.head(rest),
            "state" => self.state(rest),
            "input" => {
                let value = self.declare(rest)?;
                self.plan.inputs.push(value);
                Ok(())
            }
            "output" => {
                let value = self.operand(rest)?;
                self.plan.outputs.push(value);
                Ok(())
            }
            _ => self.step(word, rest),
        }
    }

    fn head(&mut self, rest: &str) -> Result<(), String> {
        let mut words = rest.split_whitespace();
        self.plan.name = words.next().ok_or("a plan needs a name")?.to_string();
        for word in words {
            let (key, value) = word.split_once('=').ok_or_else(|| format!("'{word}' is not key=value"))?;
            if key == "mesh" {
                self.plan.mesh = value.parse()?;
                continue;
            }
            let value: usize = value.parse().map_err(|_| format!("'{word}' is not a number"))?;
            match key {
                "batch" => self.plan.key.batch = value,
                "height" => self.plan.key.height = value,
                "width" => self.plan.key.width = value,
                "arena" => self.plan.arena = value,
                _ => return Err(format!("unknown key '{key}'")),
            }
        }
        Ok(())
    }

    fn state(&mut self, rest: &str) -> Result<(), String> {
        let mut words = rest.splitn(3, ' ');
        let (Some(name), Some(ty), Some(role)) = (words.next(), words.next(), words.next()) else {
            return Err("a state needs a name, a type and a role".into());
        };
        let ty: Type = ty.parse().map_err(|e: crate::types::BadType| e.to_string())?;
        let (role, home) = match role.rsplit_once(' ').filter(|(_, home)| home.contains('@')) {
            Some((role, home)) => (role, home),
            None => (role, ""),
        };
        let (home, held) = home.split_once('/').unwrap_or((home, ""));
        let home = if home.is_empty() { Home::Nowhere } else { home_of(home)? };
        let held = self.held(held)?;
        let role: Role = serde_json::from_str(role).map_err(|_| format!("'{role}' is not a role"))?;
        let id = StateId(self.plan.states.len() as u32);
        self.plan.states.push(State { name: name.to_string(), ty, role, home, held });
        match self.states.insert(name.to_string(), id) {
            Some(_) => Err(format!("two states are named {name}")),
            None => Ok(()),
        }
    }

    /// What a rank holds of a state: `shard=data:2`, `within=data:2` or `of=NAME+64`; all of it, if nothing is said.
    fn held(&self, text: &str) -> Result<Held, String> {
        let bad = || format!("'{text}' is not what a rank holds");
        match text.split_once('=') {
            None if text.is_empty() => Ok(Held::Whole),
            Some(("shard", group)) => Ok(Held::Shard(group.to_string().try_into()?)),
            Some(("within", group)) => Ok(Held::Within(group.to_string().try_into()?)),
            Some(("of", place)) => {
                let (flat, start) = place.rsplit_once('+').ok_or_else(bad)?;
                Ok(Held::Of { flat: self.find_state(flat)?, start: start.parse().map_err(|_| bad())? })
            }
            _ => Err(bad()),
        }
    }

    fn find_state(&self, name: &str) -> Result<StateId, String> {
        self.states.get(name).copied().ok_or_else(|| format!("no state is named {name}"))
    }

    /// A use of a value or state.
    fn operand(&mut self, text: &str) -> Result<usize, String> {
        if let Some(value) = self.values.get(text) {
            return Ok(*value);
        }
        match text.strip_prefix('$') {
            Some(state) => self.state_value(state),
            None => Err(format!("no value is named {text}")),
        }
    }

    /// A new value that lives in a state; from now on `$name` means it.
    fn state_value(&mut self, name: &str) -> Result<usize, String> {
        let id = self.find_state(name)?;
        let ty = self.plan.states[id.index()].ty.clone();
        self.plan.values.push(PlanValue { name: name.to_string(), ty, place: Place::State(id) });
        self.values.insert(format!("${name}"), self.plan.values.len() - 1);
        Ok(self.plan.values.len() - 1)
    }

    /// `name type @offset`, or `$state` for a result written in place.
    fn declare(&mut self, text: &str) -> Result<usize, String> {
        if let Some(state) = text.strip_prefix('$') {
            return self.state_value(state);
        }
        let words: Vec<&str> = text.split_whitespace().collect();
        let [name, ty, offset] = words[..] else {
            return Err(format!("'{text}' is not: name type @offset"));
        };
        let ty: Type = ty.parse().map_err(|e: crate::types::BadType| e.to_string())?;
        let offset = offset.strip_prefix('@').and_then(|o| o.parse().ok());
        let place = Place::Arena(offset.ok_or_else(|| format!("'{text}' has no @offset"))?);
        self.plan.values.push(PlanValue { name: name.to_string(), ty, place });
        match self.values.insert(name.to_string(), self.plan.values.len() - 1) {
            Some(_) => Err(format!("two values are named {name}")),
            None => Ok(self.plan.values.len() - 1),
        }
    }

    fn step(&mut self, number: &str, rest: &str) -> Result<(), String> {
        if number.parse() != Ok(self.plan.steps.len()) {
            return Err(format!("expected step {}, got '{number}'", self.plan.steps.len()));
        }
        let (work, place) = rest.rsplit_once(" ; ").ok_or("a step ends with ; phase layer")?;
        let (phase, layer) = place.split_once(' ').ok_or("a step ends with ; phase layer")?;
        let phase = word::<Phase>(phase)?;
        let (lane, work) = work.split_once(' ').ok_or("a step starts with its lane")?;
        let lane = word::<Lane>(lane)?;
        let (outputs, call) = work.split_once(" = ").ok_or("a step is: outputs = op(inputs)")?;
        let (name, call) = call.split_once('(').ok_or("a step is: outputs = op(inputs)")?;
        let (inputs, tail) = call.split_once(')').ok_or("the inputs have no end")?;
        let inputs = operands(inputs).map(|text| self.operand(text)).collect::<Result<Vec<_>, _>>()?;
        let mut tail = tail_of(tail)?;
        let (op, outputs) = if name == "assign" {
            let state = outputs.trim().strip_prefix('$').ok_or("assign writes a $state")?;
            (Op::Assign { state: self.find_state(state)? }, vec![])
        } else {
            tail.attributes.insert("op".into(), name.into());
            let op = serde_json::from_value(std::mem::take(&mut tail.attributes).into())
                .map_err(|e| format!("{name}: {e}"))?;
            (op, operands(outputs).map(|text| self.declare(text)).collect::<Result<Vec<_>, _>>()?)
        };
        let after = tail.after.iter().map(|state| self.find_state(state)).collect::<Result<_, _>>()?;
        let Tail { joined, waits, left, scratch, parts, .. } = tail;
        let step = Step::new(op, inputs, outputs, lane, layer.to_string(), phase);
        self.plan.steps.push(Step { joined, waits, left, after, scratch, parts, ..step });
        Ok(())
    }
}

/// Splits at commas outside brackets, since types have commas inside theirs.
fn operands(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0i32;
    text.split(move |c| {
        depth += i32::from(c == '[') - i32::from(c == ']');
        c == ',' && depth == 0
    })
    .map(str::trim)
    .filter(|t| !t.is_empty())
}

/// `@0`, `own@0` or `host@0`.
fn home_of(text: &str) -> Result<Home, String> {
    let bad = || format!("'{text}' is not a place");
    let (memory, offset) = text.split_once('@').ok_or_else(bad)?;
    let offset = offset.parse().map_err(|_| bad())?;
    match memory {
        "" => Ok(Home::Arena(offset)),
        "own" => Ok(Home::Own(offset)),
        "host" => Ok(Home::Host(offset)),
        _ => Err(bad()),
    }
}

fn word<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_value(text.into()).map_err(|_| format!("'{text}' is not known here"))
}

#[derive(Default)]
struct Tail {
    attributes: serde_json::Map<String, serde_json::Value>,
    joined: bool,
    waits: Vec<usize>,
    left: bool,
    after: Vec<String>,
    scratch: Option<ScratchRange>,
    parts: Option<ScratchRange>,
}

/// `key=value` attributes of the op, `joined`, `wait=1,2`, `left`, `after=state`, `scratch=bytes@offset`, `parts=bytes@offset`.
fn tail_of(text: &str) -> Result<Tail, String> {
    let mut tail = Tail::default();
    for item in text.split_whitespace() {
        if item == "joined" || item == "left" {
            *(if item == "left" { &mut tail.left } else { &mut tail.joined }) = true;
            continue;
        }
        let (key, value) = item.split_once('=').ok_or_else(|| format!("'{item}' is not key=value"))?;
        let bad = || format!("'{item}' is not understood");
        match key {
            "wait" => {
                tail.waits =
                    value.split(',').map(|w| w.parse().map_err(|_| bad())).collect::<Result<_, _>>()?;
            }
            "after" => tail.after = value.split(',').map(str::to_string).collect(),
            "scratch" | "parts" => {
                let (bytes, offset) = value.split_once('@').ok_or_else(bad)?;
                let bytes = bytes.parse().map_err(|_| bad())?;
                let range = ScratchRange { offset: offset.parse().map_err(|_| bad())?, bytes };
                *(if key == "parts" { &mut tail.parts } else { &mut tail.scratch }) = Some(range);
            }
            _ => {
                tail.attributes.insert(key.into(), serde_json::from_str(value).map_err(|_| bad())?);
            }
        }
    }
    Ok(tail)
}
