//! Files are read back field by field: nodes, constants and shapes are what ONNX asks for. What they compute is compared with onnxruntime
//! by `scripts/onnx-check`.

use super::*;
use models::names::Tensor;
use std::collections::{BTreeMap, BTreeSet};
use testing::Folder;

/// A field of a message on the wire.
#[derive(Clone, Debug)]
enum Field {
    Int(i64),
    Fixed(u32),
    Bytes(Vec<u8>),
}

/// Fields of a message, by number.
#[derive(Default)]
struct Fields(BTreeMap<u64, Vec<Field>>);

impl Fields {
    fn of(mut bytes: &[u8]) -> Fields {
        let mut fields = Fields::default();
        while !bytes.is_empty() {
            let key = varint(&mut bytes);
            let field = match key & 7 {
                0 => Field::Int(varint(&mut bytes) as i64),
                5 => Field::Fixed(u32::from_le_bytes(take(&mut bytes, 4).try_into().unwrap())),
                2 => {
                    let length = varint(&mut bytes) as usize;
                    Field::Bytes(take(&mut bytes, length).to_vec())
                }
                kind => panic!("field {} is of kind {kind}", key >> 3),
            };
            fields.0.entry(key >> 3).or_default().push(field);
        }
        fields
    }

    fn all(&self, number: u64) -> impl Iterator<Item = &Field> {
        self.0.get(&number).into_iter().flatten()
    }

    fn ints(&self, number: u64) -> Vec<i64> {
        self.all(number)
            .map(|field| if let Field::Int(x) = field { *x } else { panic!("{field:?}") })
            .collect()
    }

    fn bytes(&self, number: u64) -> Vec<Vec<u8>> {
        let bytes = |field: &Field| if let Field::Bytes(x) = field { x.clone() } else { panic!("{field:?}") };
        self.all(number).map(bytes).collect()
    }

    fn messages(&self, number: u64) -> Vec<Fields> {
        self.bytes(number).iter().map(|bytes| Fields::of(bytes)).collect()
    }

    fn texts(&self, number: u64) -> Vec<String> {
        self.bytes(number).into_iter().map(|bytes| String::from_utf8(bytes).unwrap()).collect()
    }

    fn text(&self, number: u64) -> String {
        let [text] = &self.texts(number)[..] else { panic!("field {number} is not one text") };
        text.clone()
    }

    fn one(&self, number: u64) -> Fields {
        let [bytes] = &self.bytes(number)[..] else { panic!("field {number} is not one message") };
        Fields::of(bytes)
    }

    /// Dimensions of a ValueInfoProto; none for the batch.
    fn dims(&self) -> Vec<Option<i64>> {
        let shape = self.one(2).one(1).one(2);
        shape.messages(1).iter().map(|dim| dim.ints(1).first().copied()).collect()
    }
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let end = bytes.iter().position(|byte| byte & 0x80 == 0).unwrap() + 1;
    let digits = take(bytes, end).iter().enumerate();
    digits.fold(0, |value, (i, byte)| value | u64::from(byte & 0x7f) << (7 * i))
}

fn take<'b>(bytes: &mut &'b [u8], count: usize) -> &'b [u8] {
    let (taken, rest) = bytes.split_at(count);
    *bytes = rest;
    taken
}

fn weights(network: &Network) -> Weights {
    let tensor = |shape: Vec<usize>| Tensor { data: vec![0.5; shape.iter().product()], shape };
    network.expected().into_iter().map(|(name, shape)| (name, tensor(shape))).collect()
}

fn card(model: &str) -> Card {
    let names = ["cat, small".to_string(), "Hündin \"Asta\"".to_string()];
    let (mean, std) = (vec![0.485, 0.456, 0.406], vec![0.229, 0.224, 0.225]);
    Card { model: Some(model.into()), mean, std, class_names: names.to_vec(), ..Card::default() }
}

fn saved(network: &Network, model: &str) -> Fields {
    let folder = Folder::new(&format!("onnx-{}", model.replace('/', "-")));
    let path = folder.0.join("model.onnx");
    save(&path, network, &weights(network), &card(model)).unwrap();
    Fields::of(&std::fs::read(path).unwrap())
}

/// Checks that names are defined before they are used, once each, and that constants have as many bytes as their shapes say. Bytes of all
/// constants by name.
fn check(graph: &Fields) -> BTreeMap<String, usize> {
    let mut constants = BTreeMap::new();
    for tensor in graph.messages(5) {
        let elements: i64 = tensor.ints(1).iter().product();
        let size = match tensor.ints(2)[..] {
            [1] => 4,
            [7] => 8,
            ref other => panic!("type {other:?}"),
        };
        let [bytes] = &tensor.bytes(9)[..] else { panic!("no raw data") };
        assert_eq!(bytes.len() as i64, elements * size, "{}", tensor.text(8));
        assert!(constants.insert(tensor.text(8), bytes.len()).is_none(), "{} twice", tensor.text(8));
    }
    let mut defined: BTreeSet<String> = constants.keys().cloned().collect();
    let mut used = BTreeSet::new();
    defined.extend(graph.messages(11).iter().map(|input| input.text(1)));
    for node in graph.messages(1) {
        for input in node.texts(1) {
            assert!(defined.contains(&input), "{} uses {input} before it is there", node.text(3));
            used.insert(input);
        }
        for output in node.texts(2) {
            assert!(defined.insert(output.clone()), "{output} is defined twice");
        }
    }
    let outputs: Vec<String> = graph.messages(12).iter().map(|output| output.text(1)).collect();
    assert_eq!(outputs, ["logits"]);
    assert!(defined.contains("logits"));
    let idle: Vec<_> = constants.keys().filter(|name| !used.contains(*name)).collect();
    assert!(idle.is_empty(), "{idle:?} are used by nobody");
    let values: Vec<String> = graph.messages(13).iter().map(|value| value.text(1)).collect();
    assert!(values.iter().all(|value| defined.contains(value) && value != "logits"));
    constants
}

#[test]
fn classifiers_of_every_family_are_written() {
    let gated = Network::from(models::layer_scale_vit::LayerScaleVit {
        width: 32,
        heads: 2,
        mlp: 64,
        depth: 2,
        ..models::layer_scale_vit::LayerScaleVit::named("vit_giant_patch14_reg4_dinov2", 28, 3, 5).unwrap()
    });
    let mean = Network::from(models::vit::Vit {
        pool: models::vit::Pool::Mean,
        ..models::vit::Vit::named("vit-nano/4", 16, 3, 5).unwrap()
    });
    let named = |name: &str, image| (name.to_string(), Network::named(name, image, 3, 5).unwrap());
    for (name, network) in [
        named("vit-nano/4", 16),
        ("vit-nano/4-mean".to_string(), mean),
        named("deit3_nano_patch16_32", 32),
        named("vit_nano_patch14_reg4_dinov2", 28),
        named("vit_nano_patch14_dinov2", 28),
        ("gated".to_string(), gated),
        named("swinv2-nano/w8", 64),
        // Maps that are padded, and merged at odd sizes.
        named("swinv2-nano/w8", 100),
        named("swinv2-nano/w12to16", 96),
    ] {
        let model = saved(&network, &name);
        assert_eq!((model.ints(1), model.text(2)), (vec![FORMAT], "vitesse".to_string()));
        assert_eq!(model.one(8).ints(2), [OPERATORS]);
        let graph = model.one(7);
        let constants = check(&graph);
        // Every parameter is there, as it is or transposed, and as large as it was.
        for (parameter, shape) in network.expected() {
            let found = constants.get(&parameter).or(constants.get(&format!("{parameter}.T")));
            assert_eq!(found, Some(&(4 * shape.iter().product::<usize>())), "{name}: {parameter}");
        }
        let side = network.image() as i64;
        let [images, logits] = [11, 12].map(|field| graph.one(field).dims());
        assert_eq!(images, [None, Some(3), Some(side), Some(side)]);
        assert_eq!(logits, [None, Some(5)]);
        let batched = graph.messages(13).iter().filter(|value| value.dims()[0].is_none()).count();
        assert!(batched > 10, "{batched}");
    }
}

#[test]
fn a_linear_layer_is_a_matmul_by_the_transpose() {
    let network = Network::named("vit-nano/4", 8, 1, 2).unwrap();
    let mut weights = weights(&network);
    let head = weights.get_mut("head.weight").unwrap();
    head.data = (0..head.data.len()).map(|i| i as f32).collect();
    let folder = Folder::new("onnx-transposed");
    let path = folder.0.join("model.onnx");
    save(&path, &network, &weights, &card("vit-nano/4")).unwrap();
    let graph = Fields::of(&std::fs::read(path).unwrap()).one(7);
    let tensors = graph.messages(5);
    let head = tensors.iter().find(|tensor| tensor.text(8) == "head.weight.T").unwrap();
    assert_eq!(head.ints(1), [96, 2]);
    let values: Vec<f32> =
        head.bytes(9)[0].chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect();
    assert_eq!(values[..4], [0.0, 96.0, 1.0, 97.0]);
    let norm = graph.messages(1).into_iter().find(|node| node.text(4) == "LayerNormalization").unwrap();
    let attributes: BTreeMap<String, Fields> =
        norm.messages(5).into_iter().map(|attribute| (attribute.text(1), attribute)).collect();
    assert_eq!(attributes["axis"].ints(3), [-1]);
    let Some(Field::Fixed(eps)) = attributes["epsilon"].all(2).next() else { panic!("no float") };
    assert_eq!(f32::from_bits(*eps), 1e-6);
}

#[test]
fn the_file_says_what_images_must_be() {
    let network = Network::named("vit-nano/4", 16, 3, 2).unwrap();
    let model = saved(&network, "vit-nano/4");
    let about: BTreeMap<String, String> =
        model.messages(14).iter().map(|entry| (entry.text(1), entry.text(2))).collect();
    assert_eq!(about["mean"], "0.485,0.456,0.406");
    assert_eq!(about["std"], "0.229,0.224,0.225");
    assert_eq!((&about["model"][..], &about["image_size"][..]), ("vit-nano/4", "16"));
    assert_eq!(about["vitesse_version"], env!("CARGO_PKG_VERSION"));
    let names: Vec<String> = serde_json::from_str(&about["class_names"]).unwrap();
    assert_eq!(names, card("").class_names);
    let told = "images: RGB, channels first, 16×16 px, each value from 0 to 1 minus its channel's mean (0.485,0.456,0.406) over its std \
                (0.229,0.224,0.225)";
    assert_eq!((&about["preprocessing"][..], model.one(7).one(11).text(3)), (told, told.to_string()));
}

#[test]
fn what_has_no_form_is_refused_by_name() {
    let folder = Folder::new("onnx-refused");
    let path = folder.0.join("model.onnx");
    let refused = |network: &Network, weights: &Weights| {
        save(&path, network, weights, &card("x"))
            .unwrap_err()
            .to_string()
            .replace(folder.0.to_str().unwrap(), "")
    };
    let upernet = Network::named("swinv2-nano/w8+upernet", 64, 3, 5).unwrap();
    let text = "/model.onnx: ONNX files are written of classifiers, and x has a class for each pixel";
    assert_eq!(refused(&upernet, &weights(&upernet)), text);
    let network = Network::named("vit-nano/4", 16, 3, 2).unwrap();
    assert_eq!(
        refused(&network, &Weights::new()),
        "/model.onnx: the weights have no patch_embed.proj.weight"
    );
    // Ops that no classifier has, by the graph of a head for pixels.
    let mut graph = upernet.build(BATCH, Loss::default(), DType::F32).unwrap().eval;
    graph.outputs = graph.outputs.last().copied().into_iter().collect();
    graph.prune();
    let walk = Walk { path: Path::new("m.onnx"), graph: &graph, weights: &weights(&upernet) };
    let error = walk.nodes().err().unwrap().to_string();
    assert!(error.starts_with("m.onnx: ") && error.ends_with(" has no ONNX form"), "{error}");
    assert!(!path.exists());
}

#[test]
fn a_model_beyond_what_protocol_buffers_hold_is_refused() {
    let folder = Folder::new("onnx-large");
    let network = Network::named("vit-nano/4", 16, 3, 2).unwrap();
    // Never touched: pages of zeros are the system's until they are written.
    let large = Tensor { shape: vec![3 << 28], data: vec![0.0; 3 << 28] };
    let weights = Weights::from([("large".to_string(), large)]);
    let error = save(&folder.0.join("m.onnx"), &network, &weights, &card("x")).unwrap_err().to_string();
    assert!(
        error.ends_with(
            "the model takes 3.2 GB, but an ONNX file holds 2.1 GB at most: write safetensors instead"
        ),
        "{error}"
    );
}
