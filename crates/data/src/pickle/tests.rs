use super::*;

fn root_int(bytes: &[u8]) -> Option<i64> {
    Pickle::read(bytes).unwrap().root().int()
}

fn refusal(bytes: &[u8]) -> String {
    Pickle::read(bytes).unwrap_err().to_string()
}

fn ints(value: Value) -> Vec<i64> {
    value.items().unwrap().map(|item| item.int().unwrap()).collect()
}

/// `make.py` beside the files wrote the same values with Python 2 and 3, in every protocol they have.
#[test]
fn every_protocol_gives_the_same_values() {
    macro_rules! files {
        ($($name:literal),*) => { [$(($name, include_bytes!(concat!("../../tests/fixtures/pickle/", $name)).as_slice())),*] };
    }
    let files = files![
        "python2-protocol0.pkl",
        "python2-protocol1.pkl",
        "python2-protocol2.pkl",
        "python3-protocol0.pkl",
        "python3-protocol1.pkl",
        "python3-protocol2.pkl",
        "python3-protocol3.pkl",
        "python3-protocol4.pkl",
        "python3-protocol5.pkl"
    ];
    for (file, bytes) in files {
        let pickle = Pickle::read(bytes).unwrap_or_else(|error| panic!("{file}: {error}"));
        let get = |name: &str| pickle.root().get(name).unwrap_or_else(|| panic!("{file}: {name}"));
        let (big, small) = (1 << 40, 1 << 31);
        assert_eq!(
            ints(get("numbers")),
            [0, 1, -1, 255, 256, 65535, 65536, -small, big, -big, i64::MAX, i64::MIN],
            "{file}"
        );
        let truth: Vec<_> = get("truth").items().unwrap().map(|v| (v.bool(), v.is_none())).collect();
        assert_eq!(truth, [(Some(true), false), (Some(false), false), (None, true)], "{file}");
        let floats: Vec<_> = get("floats").items().unwrap().map(|v| v.float().unwrap()).collect();
        assert_eq!(floats, [0.0, -1.5, 1e300], "{file}");
        assert_eq!(get("text").text(), Some("café € 😀 \\ '"), "{file}");
        assert_eq!(get("string").text(), Some("it's \"quoted\"\n\t\\"), "{file}");
        assert_eq!(get("bytes").bytes().as_deref(), Some(&b"\x00\x7f\x80\xff'\n"[..]), "{file}");
        let lengths: Vec<_> = get("tuples").items().unwrap().map(|t| t.items().unwrap().len()).collect();
        assert_eq!(lengths, [0, 1, 2, 3, 4], "{file}");
        let (one, two) = (get("shared").item(0).unwrap(), get("shared").item(1).unwrap());
        assert_eq!((one.id, one.items().unwrap().len()), (two.id, 3), "{file}");
        assert_eq!(one.item(2).unwrap().id, one.id, "{file}: a list that contains itself");
        assert_eq!(
            get("ordered").callable().unwrap().global(),
            Some(("collections", "OrderedDict")),
            "{file}"
        );
        assert!(pickle.globals().any(|global| global.1 == "complex"), "{file}");
        assert_eq!(get("empty").item(1).unwrap().entries().unwrap().len(), 0, "{file}");
    }
}

#[test]
fn calls_are_noted_and_not_made() {
    let pickle = Pickle::read(b"cos\nsystem\n(S'rm -rf /'\ntR.").unwrap();
    assert_eq!(pickle.globals().collect::<Vec<_>>(), [("os", "system")]);
    let call = pickle.root();
    assert_eq!(call.callable().unwrap().global(), Some(("os", "system")));
    assert_eq!(call.args().unwrap().item(0).unwrap().text(), Some("rm -rf /"));
    assert!(call.state().is_none() && call.bytes().is_none() && call.text().is_none());
}

#[test]
fn an_object_keeps_what_is_added_to_it() {
    let pickle = Pickle::read(b"\x80\x02cm\nC\n)\x81(K\x01K\x02u(K\x03K\x04eK\x05b.").unwrap();
    let object = pickle.root();
    let entries: Vec<_> = object.entries().unwrap().map(|(key, value)| (key.int(), value.int())).collect();
    assert_eq!(entries, [(Some(1), Some(2))]);
    assert_eq!(object.state().unwrap().int(), Some(5));
    assert_eq!(object.object().unwrap().items.len(), 2);
    for made_otherwise in [&b"(cm\nC\nK\x01o."[..], b"(K\x01im\nC\n.", b"cm\nC\n(K\x01t}\x92."] {
        let pickle = Pickle::read(made_otherwise).unwrap();
        assert_eq!(pickle.root().callable().unwrap().global(), Some(("m", "C")));
    }
    let kept_elsewhere = Pickle::read(b"K\x07Q.").unwrap();
    assert_eq!(kept_elsewhere.root().persistent_id().unwrap().int(), Some(7));
    assert_eq!(Pickle::read(b"Pkey\n.").unwrap().root().persistent_id().unwrap().text(), Some("key"));
}

#[test]
fn long_numbers_keep_their_sign() {
    assert_eq!(root_int(b"\x8a\x00."), Some(0));
    assert_eq!(root_int(b"\x8a\x01\xff."), Some(-1));
    assert_eq!(root_int(b"\x8a\x02\xff\x00."), Some(255));
    assert_eq!(root_int(b"\x8b\x03\x00\x00\x00\x00\x00\x80."), Some(-(1 << 23)));
    let pickle = Pickle::read(b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01.").unwrap();
    assert_eq!((pickle.root().int(), pickle.root().long_int().map(<[u8]>::len)), (None, Some(9)));
}

#[test]
fn what_is_wrong_is_told_with_its_place() {
    for (bytes, told) in [
        (&b""[..], "byte 0 of its pickle: it ends in the middle"),
        (b"N", "byte 1 of its pickle: it ends in the middle"),
        (b"N.N", "byte 2 of its pickle: 1 bytes follow its end"),
        (b"NN\xfe.", "byte 2 of its pickle: there is no opcode 0xfe"),
        (b"\x80\x06.", "byte 0 of its pickle: protocol 6 is not known, only 0 to 5"),
        (b"\x82\x01.", "byte 0 of its pickle: it needs an extension registry, which is not in the file"),
        (b"\x97.", "byte 0 of its pickle: it needs a buffer, which is not in the file"),
        (b".", "byte 0 of its pickle: the stack is empty"),
        (b"N(a.", "byte 2 of its pickle: the stack is empty"),
        (b"Nt.", "byte 1 of its pickle: there is no mark on the stack"),
        (b"}(Nu.", "byte 3 of its pickle: a key comes without a value"),
        (b"h\x05.", "byte 0 of its pickle: nothing is remembered under 5"),
        (b"NNa.", "byte 2 of its pickle: it cannot append to None"),
        (b"]NNs.", "byte 3 of its pickle: it cannot set entries of a list"),
        (b"]Nb.", "byte 2 of its pickle: it cannot restore the state of a list"),
        (b"T\xff\xff\xff\xff.", "byte 0 of its pickle: this is not a length"),
        (b"B\xff\xff\xff\xff.", "byte 0 of its pickle: it ends in the middle"),
        (b"\x8e\xff\xff\xff\xff\xff\xff\xff\xff.", "byte 0 of its pickle: it ends in the middle"),
        (b"X\x01\x00\x00\x00\xff.", "byte 0 of its pickle: this is not UTF-8"),
        (b"I99999999999999999999\n.", "byte 0 of its pickle: this is not a whole number of 64 bits"),
        (b"S'\\q'\n.", "byte 0 of its pickle: this is not a quoted string"),
        (b"V\\ud800\n.", "byte 0 of its pickle: this is not an escaped character"),
        (b"NN\x93.", "byte 2 of its pickle: this is not the name of a class or function"),
    ] {
        assert_eq!(refusal(bytes), told);
    }
}

/// Deep enough to overflow the stack of anything that recurses.
#[test]
fn depth_costs_nothing() {
    let depth = 1_000_000;
    let nested = [&b"]".repeat(depth)[..], &b"a".repeat(depth - 1), b"."].concat();
    let mut value = Pickle::read(&nested).unwrap();
    assert_eq!(value.root().items().unwrap().len(), 1);
    let marks = [&b"(".repeat(depth)[..], &b"t".repeat(depth), b"."].concat();
    value = Pickle::read(&marks).unwrap();
    assert_eq!(value.root().items().unwrap().len(), 1);
}

/// Each list holds the one before twice: 2^1000 leaves if sharing were unrolled.
#[test]
fn sharing_costs_nothing() {
    let doubled = b"](h\x00h\x00eq\x00".repeat(1000);
    let laughs = [b"]q\x00", &doubled[..], b"."].concat();
    let pickle = Pickle::read(&laughs).unwrap();
    assert_eq!(pickle.nodes.len(), 1001);
}

#[test]
fn there_is_an_end_to_the_number_of_opcodes() {
    let many = |count: usize| [&b"N0".repeat(count / 2)[..], b"N."].concat();
    assert!(Pickle::read(&many(MAX_OPCODES - 2)).is_ok());
    assert!(refusal(&many(MAX_OPCODES)).ends_with("it has more than 4194304 opcodes"));
}
