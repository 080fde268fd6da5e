//! The figures as tables.

use std::process::Command;

use super::{Measured, REFERENCE};
use crate::bench::environment;
use crate::bench::result::{Benchmark, Table};
use crate::process;

/// Columns beside the compilers.
const VARIANTS: [(&str, &str); 4] =
    [("sys", "rdma-sys"), ("raw", "raw door"), ("any", "raw, any"), ("owned", "owned door")];

const NOTE: &str = "rvN is a receive, srq_rvN one to a shared receive queue, in1 an inline send of 32 bytes without \
    completion, em an empty poll, poll the taking of one of sixteen completions with five fields, all with all fields that \
    every provider has, ud_send a datagram; the others post and poll, one at a time or sixteen, ex by the extended \
    interface, cl by the classic one. send and recv hand a buffer over and back. qp and mr create and destroy, the \
    provider's allocations included. The raw door asks for the interface of an object once, before the loop, and under \
    \"any\" on every call.";

/// What the report shows.
pub(super) fn benchmark(measured: &Measured) -> anyhow::Result<Benchmark> {
    let mut environment = environment::here();
    environment.insert("valgrind".to_owned(), super::tools::version(&measured.tools.valgrind));
    let mut command = "cargo xtask bench overhead".to_owned();
    let mut tables = vec![figures(measured)];
    if let Some(rivals) = &measured.rivals {
        command.push_str(" --rivals");
        environment.extend(rivals.versions.clone());
        // Its allocator is in their figures.
        if let Ok(version) = process::output(Command::new("getconf").arg("GNU_LIBC_VERSION")) {
            environment.insert("glibc".to_owned(), version.trim().trim_start_matches("glibc ").to_owned());
        }
        tables.extend(rivals.tables(&measured.rows));
    }
    Ok(Benchmark {
        benchmark: "Instructions an operation".to_owned(),
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
        title: "Instructions of the caller for each operation".to_owned(),
        columns: std::iter::once("loop".to_owned()).chain(titles).collect(),
        rows: rows.collect(),
        notes: vec![format!("{NOTE} The gates are against C of {REFERENCE}.")],
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
