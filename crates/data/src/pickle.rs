//! Python's pickles, read without running anything.
//!
//! A pickle is a program for a small stack machine that may call any function it names. Here the machine
//! only takes notes: what would be called becomes an object that remembers its callable and arguments, and
//! whoever reads the result decides which names mean something. All opcodes of protocols 0 to 5 are known
//! except those that need something outside the file (extension registry, out-of-band buffers).
//!
//! # What a file can cost
//!
//! Values lie in one list and refer to each other by number. So a value that is shared is there once, a value
//! that contains itself is harmless, and neither reading nor dropping recurses, however deep the nesting.
//! An opcode adds a little to the values, the stack or the memo, and bytes and text are left where they lie. So a pickle
//! takes less than [`MEMORY_PER_BYTE`] times its own length; and as it is refused after [`MAX_OPCODES`], never more than
//! about a gigabyte.

mod input;
mod machine;
mod opcode;

use std::borrow::Cow;

/// More than any weights or labels need: a file of 10,000 CIFAR-10 images has 30,000, a ViT's weights have 7,000.
pub const MAX_OPCODES: usize = 1 << 22;

/// Memory allocated for each byte of a pickle, at most. A value takes 32 bytes, three times that while the list
/// of values grows, and the stack and the memo come on top.
pub const MEMORY_PER_BYTE: usize = 160;

/// Place and nature of an error in a pickle.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("byte {offset} of its pickle: {fault}")]
pub struct PickleError {
    /// Offset of the opcode at fault.
    pub offset: usize,
    pub fault: Fault,
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Fault {
    #[error("it ends in the middle")]
    Ends,
    #[error("{0} bytes follow its end")]
    Goes(usize),
    #[error("there is no opcode {0:#04x}")]
    Opcode(u8),
    #[error("protocol {0} is not known, only 0 to 5")]
    Protocol(u8),
    #[error("it needs {0}, which is not in the file")]
    Outside(&'static str),
    #[error("the stack is empty")]
    StackEmpty,
    #[error("there is no mark on the stack")]
    NoMark,
    #[error("a key comes without a value")]
    OddEntries,
    #[error("nothing is remembered under {0}")]
    Forgotten(u32),
    #[error("it cannot {doing} {found}")]
    Target { doing: &'static str, found: &'static str },
    #[error("this is not {0}")]
    Not(&'static str),
    #[error("it has more than {MAX_OPCODES} opcodes")]
    TooMany,
}

/// The number of a value in its pickle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Id(u32);

#[derive(Debug)]
enum Node<'a> {
    None,
    Bool(bool),
    Int(i64),
    /// Integer of more than eight bytes; little-endian, two's complement.
    LongInt(&'a [u8]),
    Float(f64),
    Bytes(Cow<'a, [u8]>),
    Text(Cow<'a, str>),
    List(Vec<Id>),
    Tuple(Vec<Id>),
    Set(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Global {
        module: &'a str,
        name: &'a str,
    },
    Object(Box<Object>),
    Persistent(Id),
}

/// Result of a call that is not made.
#[derive(Debug)]
struct Object {
    callable: Id,
    args: Id,
    state: Option<Id>,
    /// Appended to it after the call, if it is a kind of list.
    items: Vec<Id>,
    /// Set in it after the call, if it is a kind of dict.
    entries: Vec<(Id, Id)>,
}

/// A pickle that has been read; borrows its bytes and text from the file's bytes.
#[derive(Debug)]
pub struct Pickle<'a> {
    nodes: Vec<Node<'a>>,
    root: Id,
}

impl<'a> Pickle<'a> {
    /// Reads a pickle that is all of `bytes`.
    pub fn read(bytes: &'a [u8]) -> Result<Self, PickleError> {
        let (pickle, length) = Self::read_first(bytes)?;
        match bytes.len() - length {
            0 => Ok(pickle),
            rest => Err(PickleError { offset: length, fault: Fault::Goes(rest) }),
        }
    }

    /// Reads the pickle that `bytes` begins with, and says how long it is.
    pub fn read_first(bytes: &'a [u8]) -> Result<(Self, usize), PickleError> {
        machine::Machine::run(bytes)
    }

    pub fn root(&self) -> Value<'_> {
        Value { nodes: &self.nodes, id: self.root }
    }

    /// Every reference to something kept elsewhere (see [`Value::persistent_id`]).
    pub fn references(&self) -> impl Iterator<Item = Value<'_>> {
        let is_reference = |(_, node): &(usize, &Node)| matches!(node, Node::Persistent(_));
        let references = self.nodes.iter().enumerate().filter(is_reference);
        references.map(|(index, _)| Value { nodes: &self.nodes, id: Id(index as u32) })
    }

    /// Every module and name that the pickle mentions, whether or not its result has a use for it.
    pub fn globals(&self) -> impl Iterator<Item = (&str, &str)> {
        self.nodes.iter().filter_map(|node| match node {
            Node::Global { module, name } => Some((*module, *name)),
            _ => None,
        })
    }
}

/// One value of a pickle. Each question is answered with `None` when the value is of another kind.
#[derive(Clone, Copy)]
pub struct Value<'p> {
    nodes: &'p [Node<'p>],
    id: Id,
}

impl<'p> Value<'p> {
    fn node(self) -> &'p Node<'p> {
        // An id is made when its node is pushed, and nodes stay.
        &self.nodes[self.id.0 as usize]
    }

    fn at(self, id: Id) -> Value<'p> {
        Value { nodes: self.nodes, id }
    }

    pub fn is_none(self) -> bool {
        matches!(self.node(), Node::None)
    }

    pub fn bool(self) -> Option<bool> {
        match self.node() {
            Node::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// A whole number, or a truth value, which Python counts among them.
    pub fn int(self) -> Option<i64> {
        match self.node() {
            Node::Int(value) => Some(*value),
            Node::Bool(value) => Some(i64::from(*value)),
            _ => None,
        }
    }

    /// A whole number of more than eight bytes: little-endian, two's complement.
    pub fn long_int(self) -> Option<&'p [u8]> {
        match self.node() {
            Node::LongInt(bytes) => Some(bytes),
            _ => None,
        }
    }

    pub fn float(self) -> Option<f64> {
        match self.node() {
            Node::Float(value) => Some(*value),
            _ => None,
        }
    }

    /// Python 3's `bytes` and `bytearray`, and Python 2's `str`.
    ///
    /// Protocols before 3 have no opcode for bytes, so Python 3 writes a call: of a function that encodes
    /// text as Latin-1 (each character is a byte), or of the class without arguments.
    pub fn bytes(self) -> Option<Cow<'p, [u8]>> {
        if let Node::Bytes(bytes) = self.node() {
            return Some(Cow::Borrowed(bytes));
        }
        let is_class =
            |module: &str, name: &str| matches!((module, name), ("__builtin__" | "builtins", "bytes"));
        if self.call_of(is_class).and_then(Value::items).is_some_and(|args| args.len() == 0) {
            return Some(Cow::Borrowed(&[]));
        }
        let latin1 = self.encoded()?.chars().map(|c| u8::try_from(c).ok());
        latin1.collect::<Option<Vec<u8>>>().map(Cow::Owned)
    }

    /// The text of a call that encodes text as Latin-1.
    fn encoded(self) -> Option<&'p str> {
        let args = self.call_of(|module, name| (module, name) == ("_codecs", "encode"))?;
        match (args.item(0)?.node(), args.item(1)?.node()) {
            (Node::Text(text), Node::Text(encoding)) if encoding == "latin1" => Some(text),
            _ => None,
        }
    }

    /// Python 3's `str`, and Python 2's if it is UTF-8.
    pub fn text(self) -> Option<&'p str> {
        match self.node() {
            Node::Text(text) => Some(text),
            Node::Bytes(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }

    /// The items of a list or tuple.
    pub fn items(self) -> Option<impl ExactSizeIterator<Item = Value<'p>>> {
        match self.node() {
            Node::List(items) | Node::Tuple(items) => Some(items.iter().map(move |&id| self.at(id))),
            _ => None,
        }
    }

    /// One item of a list or tuple.
    pub fn item(self, index: usize) -> Option<Value<'p>> {
        self.items()?.nth(index)
    }

    /// The entries of a dict, or of an object that was filled like one, in the order they were set.
    pub fn entries(self) -> Option<impl ExactSizeIterator<Item = (Value<'p>, Value<'p>)>> {
        let entries = match self.node() {
            Node::Dict(entries) => entries,
            Node::Object(object) => &object.entries,
            _ => return None,
        };
        Some(entries.iter().map(move |&(key, value)| (self.at(key), self.at(value))))
    }

    /// The value that was last set in a dict under a name, whichever kind of string that is.
    pub fn get(self, name: &str) -> Option<Value<'p>> {
        self.entries()?.filter(|(key, _)| key.is_named(name)).last().map(|(_, value)| value)
    }

    /// Stops at the first difference: a file can have a long key for as many entries as it likes.
    fn is_named(self, name: &str) -> bool {
        match self.node() {
            Node::Text(text) => text == name,
            Node::Bytes(bytes) => **bytes == *name.as_bytes(),
            _ => self.encoded().is_some_and(|text| text == name),
        }
    }

    /// A class or function: module and name.
    pub fn global(self) -> Option<(&'p str, &'p str)> {
        match self.node() {
            Node::Global { module, name } => Some((module, name)),
            _ => None,
        }
    }

    /// Name of what would have been called to make this object.
    pub fn callable(self) -> Option<Value<'p>> {
        self.object().map(|object| self.at(object.callable))
    }

    /// Arguments it would have been called with; a tuple in any pickle that Python wrote.
    pub fn args(self) -> Option<Value<'p>> {
        self.object().map(|object| self.at(object.args))
    }

    /// State that the object would have been told to restore.
    pub fn state(self) -> Option<Value<'p>> {
        self.object()?.state.map(|id| self.at(id))
    }

    /// Reference that the pickle's writer put in place of something kept elsewhere.
    pub fn persistent_id(self) -> Option<Value<'p>> {
        match self.node() {
            Node::Persistent(id) => Some(self.at(*id)),
            _ => None,
        }
    }

    /// The arguments of a call of one of the functions that `is_it` knows by module and name.
    pub fn call_of(self, is_it: impl FnOnce(&str, &str) -> bool) -> Option<Value<'p>> {
        let (module, name) = self.callable()?.global()?;
        if is_it(module, name) { self.args() } else { None }
    }

    /// Name of this kind of value in messages.
    pub fn kind(self) -> &'static str {
        self.node().kind()
    }

    fn object(self) -> Option<&'p Object> {
        match self.node() {
            Node::Object(object) => Some(object),
            _ => None,
        }
    }
}

/// Shows the kind alone: a value may contain itself.
impl std::fmt::Debug for Value<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.kind())
    }
}

impl Node<'_> {
    fn kind(&self) -> &'static str {
        match self {
            Node::None => "None",
            Node::Bool(_) => "a truth value",
            Node::Int(_) | Node::LongInt(_) => "a whole number",
            Node::Float(_) => "a number",
            Node::Bytes(_) => "bytes",
            Node::Text(_) => "a string",
            Node::List(_) => "a list",
            Node::Tuple(_) => "a tuple",
            Node::Set(_) => "a set",
            Node::Dict(_) => "a dict",
            Node::Global { .. } => "a class or function",
            Node::Object(_) => "an object",
            Node::Persistent(_) => "a reference",
        }
    }
}

#[cfg(test)]
mod tests;
