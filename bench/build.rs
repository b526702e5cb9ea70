//! Tells the benchmarks which profile they are built with, for their tables.

use std::path::Path;

fn main() {
    // <target>/<profile>/build/<package>/out
    let out = std::env::var_os("OUT_DIR").unwrap_or_default();
    let profile = Path::new(&out).ancestors().nth(3).and_then(Path::file_name);
    let profile = profile.and_then(|name| name.to_str()).unwrap_or("unknown");
    println!("cargo::rustc-env=MILLRACE_PROFILE={profile}");
    println!("cargo::rerun-if-changed=build.rs");
}
