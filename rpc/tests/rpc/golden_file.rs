//! The protocol as a file, golden/protocol.txt: of every message of proto/*.proto its fields and its bytes with every field
//! set, the values of every enum, and the calls of every service. What differs from the file would be misread by processes
//! of another build, or by this build in what others have stored; round trips within one build notice nothing of it.
//!
//! `UPDATE_GOLDEN=1 ./test.sh --test rpc golden_file` writes the file. A part that is new is added so. One that has changed
//! is not compatible with what was there, unless only names have: the protocol's version rises, or the log's format.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use prost_reflect::{EnumDescriptor, MessageDescriptor, MethodDescriptor, ServiceDescriptor};

use crate::filled::{POOL, encoded};

/// By title (`message`, `enum` or `service`, and a full name), the lines that are below it.
type Parts = BTreeMap<String, String>;

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/rpc/golden/protocol.txt")
}

fn parts_of_descriptors() -> Parts {
    let messages = POOL.all_messages().filter(|m| !m.is_map_entry());
    let messages = messages.map(|m| (format!("message {}", m.full_name()), lines_of_message(&m)));
    let enums = POOL.all_enums().map(|e| (format!("enum {}", e.full_name()), lines_of_enum(&e)));
    let services = POOL.services();
    let services = services.map(|s| (format!("service {}", s.full_name()), lines_of_service(&s)));
    messages.chain(enums).chain(services).collect()
}

/// Names and numbers are told, too: two fields of one type that have changed places have the same bytes.
fn lines_of_message(message: &MessageDescriptor) -> String {
    let mut lines = vec!["fields".to_owned()];
    lines[0].extend(message.fields().map(|f| format!(" {}={}", f.name(), f.number())));
    for bytes in encoded(message.full_name()) {
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        lines.push(format!("bytes {hex}").trim_end().to_owned());
    }
    lines.join("\n")
}

fn lines_of_enum(of: &EnumDescriptor) -> String {
    let values: BTreeMap<i32, String> =
        of.values().map(|v| (v.number(), format!(" {}={}", v.name(), v.number()))).collect();
    let values: String = values.into_values().collect();
    format!("values{values}")
}

fn lines_of_service(service: &ServiceDescriptor) -> String {
    let line = |call: MethodDescriptor| {
        let stream = |is_stream: bool| if is_stream { "stream " } else { "" };
        format!(
            "call {}({}{}) {}{}",
            call.name(),
            stream(call.is_client_streaming()),
            call.input().full_name(),
            stream(call.is_server_streaming()),
            call.output().full_name()
        )
    };
    let lines: BTreeSet<String> = service.methods().map(line).collect();
    lines.into_iter().collect::<Vec<_>>().join("\n")
}

fn parts_of_text(text: &str) -> Parts {
    let part = |part: &str| {
        let part = part.trim_end();
        let (title, lines) = part.split_once('\n').unwrap_or((part, ""));
        (title.to_owned(), lines.to_owned())
    };
    text.split("\n\n").map(part).collect()
}

fn text_of(parts: &Parts) -> String {
    let parts: Vec<String> =
        parts.iter().map(|(title, lines)| format!("{title}\n{lines}\n")).collect();
    parts.join("\n")
}

/// What has changed, is gone or is new, in words.
fn differences(golden: &Parts, actual: &Parts) -> Vec<String> {
    let titles: BTreeSet<&String> = golden.keys().chain(actual.keys()).collect();
    let difference = |title: &String| match (golden.get(title), actual.get(title)) {
        (Some(was), Some(is)) if was == is => None,
        (Some(was), Some(is)) => Some(format!("{title} has changed, from\n{was}\nto\n{is}")),
        (Some(_), None) => Some(format!("{title} is gone")),
        (None, _) => Some(format!("{title} is not in the file: UPDATE_GOLDEN=1 adds it")),
    };
    titles.into_iter().filter_map(difference).collect()
}

#[test]
fn golden_file_of_all_messages() {
    let actual = parts_of_descriptors();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(file(), text_of(&actual)).unwrap();
    }
    let text = std::fs::read_to_string(file()).unwrap();
    let differences = differences(&parts_of_text(&text), &actual);
    assert!(differences.is_empty(), "{}", differences.join("\n\n"));
}

#[test]
fn golden_file_tells_what_has_changed_is_gone_or_is_new() {
    let golden = parts_of_text("message a\nfields x=1\nbytes 0801\n\nmessage b\nfields\nbytes\n");
    assert_eq!(golden["message b"], "fields\nbytes");
    assert_eq!(parts_of_text(&text_of(&golden)), golden);
    assert_eq!(differences(&golden, &golden), Vec::<String>::new());
    let renumbered =
        parts_of_text("message a\nfields x=2\nbytes 1001\n\nmessage c\nfields\nbytes\n");
    let expected = [
        "message a has changed, from\nfields x=1\nbytes 0801\nto\nfields x=2\nbytes 1001",
        "message b is gone",
        "message c is not in the file: UPDATE_GOLDEN=1 adds it",
    ];
    assert_eq!(differences(&golden, &renumbered), expected);
}
