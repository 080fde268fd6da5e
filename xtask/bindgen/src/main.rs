//! Generates `rdma-sys/src/bindings.rs` and the tables in `rdma-sys/src/symbols` from the headers of rdma-core.
//!
//! This is a separate crate, so that building anything else needs neither bindgen nor libclang.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;

mod bindings;
mod diff;
mod render;
mod symbols;

/// Release of rdma-core that the committed files are generated from.
///
/// To move to a newer release, change this constant and the one in `xtask/src/headers.rs`, and check
/// `rdma-sys/src/newer.rs`.
const RDMA_CORE: &str = "56.1";

/// Generates the committed bindings of rdma-sys.
#[derive(Parser)]
struct Args {
    /// Directory with `infiniband/verbs.h` and `rdma/rdma_cma.h` of rdma-core 56.1
    #[arg(long, value_name = "DIR")]
    include: PathBuf,

    /// Write nothing; fail if a committed file is out of date
    #[arg(long)]
    check: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(
        cfg!(all(target_arch = "x86_64", target_os = "linux")),
        "the committed layout assertions are for x86-64 Linux: run the generator there"
    );
    let include =
        args.include.canonicalize().with_context(|| format!("include directory {}", args.include.display()))?;
    for header in bindings::HEADERS {
        let path = include.join(header);
        ensure!(path.is_file(), "{} is missing", path.display());
    }

    let sys = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../rdma-sys");
    let table = symbols::Table::read(&sys.join("symbols.tsv"))?;
    let newer = symbols::function_types(&sys.join("src/newer.rs"))?;
    let generated = bindings::generate(&include)?;
    let mut files = vec![("src/bindings.rs", render::file(&generated.file)?)];
    for (name, file) in table.generate(&generated.functions, &newer)? {
        files.push((name, render::file(&file)?));
    }

    let mut stale = Vec::new();
    for (name, text) in &files {
        let path = sys.join(name);
        let committed = fs::read_to_string(&path).unwrap_or_default();
        if committed == *text {
            continue;
        }
        if args.check {
            eprintln!("{}", diff::summary(name, &committed, text));
            stale.push(*name);
        } else {
            fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
            eprintln!("wrote rdma-sys/{name}");
        }
    }
    if !stale.is_empty() {
        bail!(
            "{} differ from the output for the headers of rdma-core {RDMA_CORE}; run the generator and commit",
            stale.join(", ")
        );
    }
    if args.check {
        eprintln!("rdma-sys/src/bindings.rs and rdma-sys/src/symbols match the headers of rdma-core {RDMA_CORE}");
    }
    Ok(())
}
