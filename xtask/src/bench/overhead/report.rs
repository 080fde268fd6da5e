//! The figures as a table and as JSON.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde_json::json;

use super::{Measured, REFERENCE, tools};

/// Columns beside the compilers.
const VARIANTS: [(&str, &str); 3] = [("sys", "rdma-sys"), ("raw", "raw door"), ("owned", "owned door")];

pub(super) fn print(measured: &Measured) {
    let compilers = measured.tools.compilers.iter().map(|compiler| (compiler.name, format!("C {}", compiler.name)));
    let variants = VARIANTS.map(|(name, title)| (name, title.to_owned()));
    let columns: Vec<(&str, String)> = compilers.chain(variants).collect();
    print!("{:10}", "");
    for (_, title) in &columns {
        print!("{title:>12}");
    }
    println!();
    for row in &measured.rows {
        print!("{:10}", row.name);
        for (variant, _) in &columns {
            match row.instructions.get(*variant) {
                Some(figure) => print!("{figure:12.2}"),
                None => print!("{:12}", ""),
            }
        }
        println!();
    }
    println!("\ninstructions of the caller for each operation; the gates are against C of {REFERENCE}");
    for gate in &measured.gates {
        let verdict = if gate.met { "kept  " } else { "BROKEN" };
        println!("{verdict} {}: {}", gate.name, gate.found);
    }
}

pub(super) fn write(measured: &Measured, path: &Path) -> Result<()> {
    let versions: BTreeMap<&str, String> = (measured.tools.compilers.iter())
        .map(|compiler| (compiler.name, tools::version(&compiler.path)))
        .chain([("rustc", tools::version(Path::new("rustc"))), ("valgrind", tools::version(&measured.tools.valgrind))])
        .collect();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let report = json!({
        "benchmark": "overhead",
        "unit": "instructions of the caller for each operation",
        "unix_time": now,
        "architecture": std::env::consts::ARCH,
        "reference": REFERENCE,
        "versions": versions,
        "rows": measured.rows,
        "gates": measured.gates,
    });
    let text = serde_json::to_string_pretty(&report)?;
    std::fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}
