//! Compiles proto/*.proto: the services with their messages, and, for tests/messages.rs, the durable messages once more.

use std::error::Error;
use std::path::PathBuf;

const FILES: [&str; 10] = [
    "catalog",
    "version",
    "log",
    "node",
    "compute",
    "compactor",
    "meta",
    "operator",
    "dml",
    "read",
];
/// Packages whose messages are written by hand, in a module of the same name.
const BY_HAND: [&str; 3] = ["catalog", "version", "log"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = FILES.map(|name| format!("proto/{name}.proto"));
    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler.include_source_info(true).include_imports(true).open_files(&files)?;
    let descriptors = compiler.file_descriptor_set();
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), compiler.encode_file_descriptor_set())?;

    let mut services = tonic_prost_build::configure().bytes(".").emit_rerun_if_changed(false);
    for package in BY_HAND {
        services =
            services.extern_path(format!(".millrace.{package}"), format!("crate::{package}"));
    }
    services.compile_fds(descriptors.clone())?;

    let twins = out.join("twins");
    std::fs::create_dir_all(&twins)?;
    let durable = tonic_prost_build::configure()
        .build_client(false)
        .build_server(false)
        .bytes(".")
        .btree_map(".")
        .emit_rerun_if_changed(false)
        .out_dir(&twins)
        .include_file("twins.rs");
    let mut durable_files = descriptors;
    durable_files
        .file
        .retain(|file| BY_HAND.iter().any(|p| file.package() == format!("millrace.{p}")));
    durable.compile_fds(durable_files)?;
    Ok(())
}
