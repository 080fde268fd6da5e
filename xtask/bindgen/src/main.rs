//! Writes `rdma-sys/src/bindings.rs` and `rdma-sys/src/symbols.rs` from the headers of rdma-core.
//!
//! A crate of its own, so that nobody else compiles bindgen or needs libclang.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;

mod bindings;
mod diff;
mod render;
mod symbols;

/// The release whose headers the committed files come from. A new one is a change here, in
/// `xtask/src/headers.rs`, and a look at `rdma-sys/src/newer.rs`.
const RDMA_CORE: &str = "56.1";

/// Generates the committed bindings of rdma-sys.
#[derive(Parser)]
struct Args {
    /// Folder that holds `infiniband/verbs.h` and `rdma/rdma_cma.h` of rdma-core 56.1
    #[arg(long, value_name = "DIR")]
    include: PathBuf,

    /// Write nothing; fail when a committed file differs from what would be written
    #[arg(long)]
    check: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(
        cfg!(all(target_arch = "x86_64", target_os = "linux")),
        "the committed layout assertions are those of x86-64 Linux: run the generator there"
    );
    let include = args.include.canonicalize().with_context(|| format!("include folder {}", args.include.display()))?;
    for header in bindings::HEADERS {
        let path = include.join(header);
        ensure!(path.is_file(), "{} is missing", path.display());
    }

    let sys = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../rdma-sys");
    let table = symbols::Table::read(&sys.join("symbols.tsv"))?;
    let newer = symbols::function_types(&sys.join("src/newer.rs"))?;
    let generated = bindings::generate(&include)?;
    let files = [
        ("src/bindings.rs", render::file(&generated.file)?),
        ("src/symbols.rs", render::file(&table.generate(&generated.functions, &newer)?)?),
    ];

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
            "{} differ from what rdma-core {RDMA_CORE}'s headers give; run the generator and commit",
            stale.join(", ")
        );
    }
    if args.check {
        eprintln!("rdma-sys/src/bindings.rs and rdma-sys/src/symbols.rs are what rdma-core {RDMA_CORE}'s headers give");
    }
    Ok(())
}
