//! The stack machine that pickles are programs for.

use std::borrow::Cow;
use std::collections::HashMap;

use super::input::{Input, unescape, unquote, utf8};
use super::{Fault, Id, MAX_OPCODES, Node, Object, Pickle, PickleError, opcode as op};

const LATEST_PROTOCOL: u8 = 5;

pub(super) struct Machine<'a> {
    input: Input<'a>,
    nodes: Vec<Node<'a>>,
    stack: Vec<Id>,
    /// Heights of the stack at which a group of values begins. Nothing below the last is in reach.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

impl<'a> Machine<'a> {
    /// Runs the program that `bytes` begins with; gives its result and its length.
    pub fn run(bytes: &'a [u8]) -> Result<(Pickle<'a>, usize), PickleError> {
        let mut machine = Machine {
            input: Input::new(bytes),
            nodes: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
        };
        for _ in 0..MAX_OPCODES {
            let offset = machine.input.position();
            let result = machine.step().map_err(|fault| PickleError { offset, fault })?;
            if let Some(root) = result {
                return Ok((Pickle { nodes: machine.nodes, root }, machine.input.position()));
            }
        }
        Err(PickleError { offset: machine.input.position(), fault: Fault::TooMany })
    }

    /// Follows one opcode. The last one gives the pickle's value.
    fn step(&mut self) -> Result<Option<Id>, Fault> {
        let opcode = self.input.byte()?;
        if opcode == op::STOP {
            return self.pop().map(Some);
        }
        let made = match self.literal(opcode)? {
            Some(literal) => Some(literal),
            None => self.composed(opcode)?,
        };
        match made {
            Some(node) => self.push(node),
            None => self.rearrange(opcode)?,
        }
        Ok(None)
    }

    /// Opcodes that make a value of nothing but bytes of the file.
    fn literal(&mut self, opcode: u8) -> Result<Option<Node<'a>>, Fault> {
        let input = &mut self.input;
        let bytes = |bytes| Node::Bytes(Cow::Borrowed(bytes));
        let text = |bytes| Ok(Node::Text(Cow::Borrowed(utf8(bytes)?)));
        Ok(Some(match opcode {
            op::NONE => Node::None,
            op::NEWTRUE => Node::Bool(true),
            op::NEWFALSE => Node::Bool(false),
            op::INT => int_line(utf8(input.line()?)?)?,
            op::LONG => long_line(utf8(input.line()?)?)?,
            op::BININT => Node::Int(i32::from_le_bytes(input.array()?).into()),
            op::BININT1 => Node::Int(input.byte()?.into()),
            op::BININT2 => Node::Int(u16::from_le_bytes(input.array()?).into()),
            op::LONG1 => long(input.take_u8()?),
            op::LONG4 => long(input.take_i32()?),
            op::FLOAT => float_line(utf8(input.line()?)?)?,
            op::BINFLOAT => Node::Float(f64::from_be_bytes(input.array()?)),
            op::STRING => Node::Bytes(unquote(input.line()?)?),
            op::SHORT_BINSTRING | op::SHORT_BINBYTES => bytes(input.take_u8()?),
            op::BINSTRING => bytes(input.take_i32()?),
            op::BINBYTES => bytes(input.take_u32()?),
            op::BINBYTES8 | op::BYTEARRAY8 => bytes(input.take_u64()?),
            op::UNICODE => Node::Text(unescape(input.line()?)?),
            op::SHORT_BINUNICODE => text(input.take_u8()?)?,
            op::BINUNICODE => text(input.take_u32()?)?,
            op::BINUNICODE8 => text(input.take_u64()?)?,
            op::EMPTY_LIST => Node::List(Vec::new()),
            op::EMPTY_TUPLE => Node::Tuple(Vec::new()),
            op::EMPTY_DICT => Node::Dict(Vec::new()),
            op::EMPTY_SET => Node::Set(Vec::new()),
            op::GLOBAL => Node::Global { module: utf8(input.line()?)?, name: utf8(input.line()?)? },
            _ => return Ok(None),
        }))
    }

    /// Opcodes that make a value of others, which they take from the stack.
    fn composed(&mut self, opcode: u8) -> Result<Option<Node<'a>>, Fault> {
        Ok(Some(match opcode {
            op::LIST => Node::List(self.group()?),
            op::TUPLE => Node::Tuple(self.group()?),
            op::TUPLE1 => Node::Tuple(self.popped::<1>()?.to_vec()),
            op::TUPLE2 => Node::Tuple(self.popped::<2>()?.to_vec()),
            op::TUPLE3 => Node::Tuple(self.popped::<3>()?.to_vec()),
            op::FROZENSET => Node::Set(self.group()?),
            op::DICT => Node::Dict(pairs(&self.group()?)?),
            op::STACK_GLOBAL => {
                let [module, name] = self.popped()?;
                Node::Global { module: self.borrowed_text(module)?, name: self.borrowed_text(name)? }
            }
            op::PERSID => {
                let name = Cow::Borrowed(utf8(self.input.line()?)?);
                Node::Persistent(self.keep(Node::Text(name)))
            }
            op::BINPERSID => Node::Persistent(self.pop()?),
            op::REDUCE | op::NEWOBJ => {
                let [callable, args] = self.popped()?;
                Object::made_by(callable, args)
            }
            op::NEWOBJ_EX => {
                let [callable, args, named] = self.popped()?;
                let args = self.keep(Node::Tuple(vec![args, named]));
                Object::made_by(callable, args)
            }
            op::INST => {
                let class =
                    Node::Global { module: utf8(self.input.line()?)?, name: utf8(self.input.line()?)? };
                let args = self.group()?;
                Object::made_by(self.keep(class), self.keep(Node::Tuple(args)))
            }
            op::OBJ => {
                let group = self.group()?;
                let (&class, args) = group.split_first().ok_or(Fault::StackEmpty)?;
                Object::made_by(class, self.keep(Node::Tuple(args.to_vec())))
            }
            _ => return Ok(None),
        }))
    }

    /// Opcodes that add to a value, or move values between the stack and the memo.
    fn rearrange(&mut self, opcode: u8) -> Result<(), Fault> {
        match opcode {
            op::MARK => self.marks.push(self.stack.len()),
            op::POP => {
                if self.pop().is_err() {
                    self.group()?;
                }
            }
            op::POP_MARK => drop(self.group()?),
            op::DUP => self.stack.push(self.top()?),
            op::APPEND => {
                let item = self.pop()?;
                self.append(&[item])?;
            }
            op::APPENDS | op::ADDITEMS => {
                let items = self.group()?;
                self.append(&items)?;
            }
            op::SETITEM => {
                let entry = self.popped::<2>()?;
                self.set(&entry)?;
            }
            op::SETITEMS => {
                let entries = self.group()?;
                self.set(&entries)?;
            }
            op::BUILD => {
                let state = self.pop()?;
                self.build(state)?;
            }
            op::PUT | op::BINPUT | op::LONG_BINPUT => {
                let index = self.index(opcode)?;
                self.remember(index)?;
            }
            op::MEMOIZE => self.remember(self.memo.len() as u32)?,
            op::GET | op::BINGET | op::LONG_BINGET => {
                let index = self.index(opcode)?;
                let id = *self.memo.get(&index).ok_or(Fault::Forgotten(index))?;
                self.stack.push(id);
            }
            op::PROTO => {
                let protocol = self.input.byte()?;
                if protocol > LATEST_PROTOCOL {
                    return Err(Fault::Protocol(protocol));
                }
            }
            // Frames only help to read from a pipe; their lengths say nothing that the opcodes do not.
            op::FRAME => drop(self.input.array::<8>()?),
            op::EXT1 | op::EXT2 | op::EXT4 => return Err(Fault::Outside("an extension registry")),
            op::NEXT_BUFFER | op::READONLY_BUFFER => return Err(Fault::Outside("a buffer")),
            unknown => return Err(Fault::Opcode(unknown)),
        }
        Ok(())
    }

    /// Where an opcode wants something kept or fetched.
    fn index(&mut self, opcode: u8) -> Result<u32, Fault> {
        match opcode {
            op::PUT | op::GET => parsed(utf8(self.input.line()?)?, "a number of the memo"),
            op::BINPUT | op::BINGET => self.input.byte().map(u32::from),
            _ => self.input.array().map(u32::from_le_bytes),
        }
    }

    fn remember(&mut self, index: u32) -> Result<(), Fault> {
        let id = self.top()?;
        self.memo.insert(index, id);
        Ok(())
    }

    /// Adds a value without putting it on the stack. There are three for each opcode at most.
    fn keep(&mut self, node: Node<'a>) -> Id {
        self.nodes.push(node);
        Id(self.nodes.len() as u32 - 1)
    }

    fn push(&mut self, node: Node<'a>) {
        let id = self.keep(node);
        self.stack.push(id);
    }

    /// The last value of the group that is being made.
    fn top(&self) -> Result<Id, Fault> {
        let bottom = self.marks.last().copied().unwrap_or(0);
        self.stack[bottom..].last().copied().ok_or(Fault::StackEmpty)
    }

    fn pop(&mut self) -> Result<Id, Fault> {
        let id = self.top()?;
        self.stack.pop();
        Ok(id)
    }

    /// The last `N` values, in the order they were pushed.
    fn popped<const N: usize>(&mut self) -> Result<[Id; N], Fault> {
        let mut ids = [Id(0); N];
        for id in ids.iter_mut().rev() {
            *id = self.pop()?;
        }
        Ok(ids)
    }

    /// Everything since the last mark.
    fn group(&mut self) -> Result<Vec<Id>, Fault> {
        let begin = self.marks.pop().ok_or(Fault::NoMark)?;
        Ok(self.stack.drain(begin..).collect())
    }

    fn top_node(&mut self) -> Result<&mut Node<'a>, Fault> {
        let id = self.top()?;
        Ok(&mut self.nodes[id.0 as usize])
    }

    fn append(&mut self, new: &[Id]) -> Result<(), Fault> {
        match self.top_node()? {
            Node::List(items) | Node::Set(items) => items.extend(new),
            Node::Object(object) => object.items.extend(new),
            other => return Err(Fault::Target { doing: "append to", found: other.kind() }),
        }
        Ok(())
    }

    fn set(&mut self, keys_and_values: &[Id]) -> Result<(), Fault> {
        let new = pairs(keys_and_values)?;
        match self.top_node()? {
            Node::Dict(entries) => entries.extend(new),
            Node::Object(object) => object.entries.extend(new),
            other => return Err(Fault::Target { doing: "set entries of", found: other.kind() }),
        }
        Ok(())
    }

    fn build(&mut self, state: Id) -> Result<(), Fault> {
        match self.top_node()? {
            Node::Object(object) => object.state = Some(state),
            other => return Err(Fault::Target { doing: "restore the state of", found: other.kind() }),
        }
        Ok(())
    }

    /// Text that lies in the file as it is.
    fn borrowed_text(&self, id: Id) -> Result<&'a str, Fault> {
        match &self.nodes[id.0 as usize] {
            Node::Text(Cow::Borrowed(text)) => Ok(text),
            _ => Err(Fault::Not("the name of a class or function")),
        }
    }
}

impl Object {
    fn made_by<'a>(callable: Id, args: Id) -> Node<'a> {
        Node::Object(Box::new(Object { callable, args, state: None, items: Vec::new(), entries: Vec::new() }))
    }
}

fn pairs(ids: &[Id]) -> Result<Vec<(Id, Id)>, Fault> {
    match ids.as_chunks() {
        (pairs, []) => Ok(pairs.iter().map(|&[key, value]| (key, value)).collect()),
        _ => Err(Fault::OddEntries),
    }
}

fn parsed<T: std::str::FromStr>(line: &str, what: &'static str) -> Result<T, Fault> {
    line.parse().map_err(|_| Fault::Not(what))
}

/// Before protocol 2, truth values were numbers of two digits.
fn int_line<'a>(line: &str) -> Result<Node<'a>, Fault> {
    match line {
        "00" => Ok(Node::Bool(false)),
        "01" => Ok(Node::Bool(true)),
        _ => parsed(line, "a whole number of 64 bits").map(Node::Int),
    }
}

fn long_line<'a>(line: &str) -> Result<Node<'a>, Fault> {
    parsed(line.strip_suffix('L').unwrap_or(line), "a whole number of 64 bits").map(Node::Int)
}

fn float_line<'a>(line: &str) -> Result<Node<'a>, Fault> {
    parsed(line, "a number").map(Node::Float)
}

/// A whole number of any length: little-endian, two's complement, nothing for zero.
fn long(bytes: &[u8]) -> Node<'_> {
    if bytes.len() > size_of::<i64>() {
        return Node::LongInt(bytes);
    }
    let negative = bytes.last().is_some_and(|&last| last >= 0x80);
    let mut all = [if negative { 0xff } else { 0 }; size_of::<i64>()];
    all[..bytes.len()].copy_from_slice(bytes);
    Node::Int(i64::from_le_bytes(all))
}
