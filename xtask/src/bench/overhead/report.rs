//! The results as tables.

use std::process::Command;

use super::{Measured, REFERENCE};
use crate::bench::environment;
use crate::bench::result::{Benchmark, Table};
use crate::process;

/// Variants and titles of the columns that follow the columns of the C compilers.
const VARIANTS: [(&str, &str); 9] = [
    ("sys", "rdma-sys"),
    ("raw", "raw API"),
    ("any", "raw, any"),
    ("owned", "owned API"),
    ("batch", "owned API, `batch`"),
    ("local", "rdma-async, one thread"),
    ("shared", "rdma-async, shared"),
    ("local driven", "rdma-async, one thread, by the driver"),
    ("shared driven", "rdma-async, shared, by the driver"),
];

const NOTE: &str = "rvN posts receives, srq_rvN posts them to a shared receive queue. in1 posts an inline send of 32 bytes \
    without a completion. em polls an empty queue. poll takes one of sixteen completions and reads five fields, all reads \
    all fields that every provider has. ud_send sends a datagram. send and recv post an owned buffer and get it back. qp and \
    mr create and destroy an object, including the provider's allocations. The others post and poll, one operation at a time \
    or sixteen. ex means the extended interface, cl the classic one. The raw API checks the interface of an object once, \
    before the loop; under \"any\" it checks on every call.";

/// The result file for the report.
pub(super) fn benchmark(measured: &Measured) -> anyhow::Result<Benchmark> {
    let mut environment = environment::collect();
    environment.insert("valgrind".to_owned(), super::tools::version(&measured.tools.valgrind));
    let mut command = "cargo xtask bench overhead".to_owned();
    let mut tables = vec![figures(measured)];
    if let Some(rivals) = &measured.rivals {
        command.push_str(" --rivals");
        environment.extend(rivals.versions.clone());
        // The figures of these crates include instructions of glibc's allocator.
        if let Ok(version) = process::output(Command::new("getconf").arg("GNU_LIBC_VERSION")) {
            environment.insert("glibc".to_owned(), version.trim().trim_start_matches("glibc ").to_owned());
        }
        tables.extend(rivals.tables(&measured.rows));
    }
    Ok(Benchmark {
        benchmark: "Instructions per operation".to_owned(),
        command,
        date: environment::today()?,
        environment,
        tables,
        gates: measured.verdicts.iter().map(|verdict| verdict.gate.clone()).collect(),
    })
}

fn figures(measured: &Measured) -> Table {
    let compilers = measured.tools.compilers.iter().map(|compiler| (compiler.name, format!("C {}", compiler.name)));
    let variants = VARIANTS.map(|(name, title)| (name, title.to_owned()));
    let (variants, titles): (Vec<&str>, Vec<String>) = compilers.chain(variants).unzip();
    let rows = measured.rows.iter().map(|row| {
        let cell =
            |variant: &&str| row.instructions.get(*variant).map(|figure| format!("{figure:.2}")).unwrap_or_default();
        std::iter::once(row.name.clone()).chain(variants.iter().map(cell)).collect()
    });
    Table {
        title: "Instructions of the caller per operation".to_owned(),
        columns: std::iter::once("loop".to_owned()).chain(titles).collect(),
        rows: rows.collect(),
        notes: vec![format!("{NOTE} The gates compare with C compiled by {REFERENCE}.")],
    }
}

pub(super) fn print(measured: &Measured, benchmark: &Benchmark) {
    for table in &benchmark.tables {
        println!("{}", table.to_text());
    }
    for verdict in &measured.verdicts {
        println!("{verdict}");
    }
}
