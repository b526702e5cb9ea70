//! Messages in which every field has a value, made from their descriptors.

use std::collections::HashMap;
use std::sync::LazyLock;

use prost::Message;
use prost_reflect::{
    DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MapKey, MessageDescriptor, Value,
};

/// All messages of proto/*.proto.
pub static POOL: LazyLock<DescriptorPool> = LazyLock::new(|| {
    let bytes = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
    DescriptorPool::decode(&bytes[..]).unwrap()
});

/// A message of this full name with every field set; of one with alternatives, one for each.
pub fn all<M: Message + Default>(name: &str) -> Vec<M> {
    let decode = |bytes: Vec<u8>| M::decode(&bytes[..]).unwrap();
    encoded(name).into_iter().map(decode).collect()
}

/// The first of them.
pub fn one<M: Message + Default>(name: &str) -> M {
    all(name).remove(0)
}

/// The same as bytes.
pub fn encoded(name: &str) -> Vec<Vec<u8>> {
    let message = POOL.get_message_by_name(name).unwrap();
    messages(&message).iter().map(DynamicMessage::encode_to_vec).collect()
}

fn messages(of: &MessageDescriptor) -> Vec<DynamicMessage> {
    let alternatives: Vec<FieldDescriptor> = of.fields().filter(is_alternative).collect();
    let mut base = DynamicMessage::new(of.clone());
    for field in of.fields().filter(|f| !is_alternative(f)) {
        base.set_field(&field, value(&field));
    }
    if alternatives.is_empty() {
        return vec![base];
    }
    let with = |field: &FieldDescriptor| {
        let mut message = base.clone();
        message.set_field(field, value(field));
        message
    };
    alternatives.iter().map(with).collect()
}

fn is_alternative(field: &FieldDescriptor) -> bool {
    field.containing_oneof().is_some_and(|oneof| !oneof.is_synthetic())
}

fn value(field: &FieldDescriptor) -> Value {
    if field.is_map() {
        let Kind::Message(entry) = field.kind() else { unreachable!("a map has entries") };
        let key = MapKey::String(format!("k{}", field.number()));
        let value = scalar(&entry.map_entry_value_field());
        return Value::Map(HashMap::from([(key, value)]));
    }
    if !field.is_list() {
        return scalar(field);
    }
    Value::List(match field.kind() {
        Kind::Message(m) => messages(&m).into_iter().map(Value::Message).collect(),
        _ => vec![scalar(field)],
    })
}

/// Values whose size, sign and type show in what is decoded.
fn scalar(field: &FieldDescriptor) -> Value {
    let n = field.number();
    match field.kind() {
        Kind::Bool => Value::Bool(true),
        Kind::Uint32 | Kind::Fixed32 => Value::U32((1 << 31) + n),
        Kind::Uint64 | Kind::Fixed64 => Value::U64((1 << 63) + u64::from(n)),
        Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => Value::I32(-5 - n as i32),
        Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => Value::I64(-(1 << 40) - i64::from(n)),
        Kind::Float => Value::F32(0.5),
        Kind::Double => Value::F64(0.5),
        Kind::String => Value::String(format!("s{n}")),
        Kind::Bytes => Value::Bytes(vec![0xfe, n as u8].into()),
        Kind::Enum(e) => {
            Value::EnumNumber(e.values().map(|v| v.number()).max().unwrap_or_default())
        }
        Kind::Message(m) => Value::Message(messages(&m).remove(0)),
    }
}
