//! The same loops over other verbs crates, as published.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::gates::{self, Verdict};
use super::tools::{self, Tools};
use super::{REFERENCE, Row, Run};
use crate::bench::result::{Gate, Table};
use crate::{apt, headers, process, workspace};

const CRATES: [&str; 2] = ["sideway", "ibverbs"];

/// Variants that the programs of these crates measure, with the titles of their columns.
const VARIANTS: [(&str, &str); 4] = [
    ("sideway", "sideway"),
    ("reused", "sideway, poller reused"),
    ("generic", "sideway, Generic"),
    ("ibverbs", "ibverbs"),
];

/// Variants of rdma-safe that the tables show for comparison.
const OURS: [(&str, &str); 2] = [("raw", "raw API"), ("owned", "owned API")];

/// Gates: a loop, a variant of sideway, and the least ratio of its instructions to the instructions of the raw API.
const FACTORS: [(&str, &str, f64); 4] =
    [("ex1", "sideway", 2.5), ("rv1", "sideway", 25.0), ("cl1", "sideway", 18.0), ("em_cl", "sideway", 12.0)];

const NOTE: &str = "The crates are unmodified, and compiled in the default release profile. The counts include the C allocator, \
    if the crate calls it. sideway creates a poller for each poll, as in its documentation. With \"poller reused\", \
    one classic poller is created once and started for each poll. \"Generic\" means sideway's enums, which hold \
    either kind of object. ibverbs posts one send or receive at a time through the classic interface. In its loop \
    send_cl1 a number identifies the buffer, and the buffer stays with the caller. A cell is empty where a crate \
    does not offer the operation. The gates divide the instructions of sideway by those of the raw API.";

/// Results of the other crates.
#[derive(Debug)]
pub(super) struct Rivals {
    /// Version of each crate.
    pub(super) versions: BTreeMap<String, String>,
    rows: Vec<Row>,
}

/// Finds or installs the build tools of the crates, which build C libraries and generate bindings.
pub(super) fn prepare() -> Result<()> {
    tools::tool("cmake", "cmake")?;
    tools::tool("make", "make")?;
    tools::tool("pkg-config", "pkg-config")?;
    headers::libclang()?;
    for (module, package) in [("libnl-3.0", "libnl-3-dev"), ("libnl-route-3.0", "libnl-route-3-dev")] {
        let present = || process::output(Command::new("pkg-config").args(["--exists", module])).is_ok();
        apt::install_unless(present, package)
            .with_context(|| format!("{module} not found; the build of the crate ibverbs needs it"))?;
    }
    Ok(())
}

/// Compiles the programs and runs them over `stub`.
pub(super) fn measure(tools: &Tools, stub: &Path) -> Result<Rivals> {
    let workspace = workspace::root().join("benches/rivals");
    let target = workspace::target_dir()?.join("rivals");
    let libraries = library_path(&target, stub)?;
    let mut command = Command::new(workspace::cargo());
    command.args(["build", "--release", "--locked", "--workspace", "--target-dir"]).arg(&target);
    // ibverbs expects libibverbs and one of its headers to be installed.
    command.env("LIBRARY_PATH", &libraries);
    command.env("BINDGEN_EXTRA_CLANG_ARGS", format!("-I{}", process::quote(tools.headers.as_os_str())));
    process::run(command.current_dir(&workspace))?;
    let mut rows = Vec::new();
    for name in CRATES {
        let program = target.join("release").join(format!("rdma-rivals-{name}"));
        let run = Run { directory: &target.join("profiles"), program: &program, arguments: &[], stub };
        for row in run.rows(&tools.valgrind, ("LD_LIBRARY_PATH", &libraries))? {
            merge(&mut rows, row);
        }
    }
    let lock = workspace.join("Cargo.lock");
    let lock = fs::read_to_string(&lock).with_context(|| format!("cannot read {}", lock.display()))?;
    let version = |name: &str| Ok((name.to_owned(), version(&lock, name).with_context(|| format!("no {name}"))?));
    Ok(Rivals { versions: CRATES.into_iter().map(version).collect::<Result<_>>()?, rows })
}

/// Creates a directory with links to the stub, under the names that the linker and the loader use for libibverbs.
fn library_path(target: &Path, stub: &Path) -> Result<PathBuf> {
    let directory = target.join("lib");
    fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
    for name in ["libibverbs.so", "libibverbs.so.1"] {
        let link = directory.join(name);
        _ = fs::remove_file(&link);
        symlink(stub, &link).with_context(|| format!("cannot create {}", link.display()))?;
    }
    Ok(directory)
}

/// Merges `row` into the row of the same loop, or appends it.
fn merge(rows: &mut Vec<Row>, row: Row) {
    match rows.iter_mut().find(|existing| existing.name == row.name) {
        Some(existing) => {
            existing.instructions.extend(row.instructions);
            existing.allocations.extend(row.allocations);
            existing.allocations_per_op.extend(row.allocations_per_op);
            existing.checksums.extend(row.checksums);
        }
        None => rows.push(row),
    }
}

/// The version of the package `name` in a `Cargo.lock`.
fn version(lock: &str, name: &str) -> Option<String> {
    let mut lines = lock.lines().skip_while(|line| *line != format!("name = \"{name}\""));
    let version = lines.nth(1)?.strip_prefix("version = \"")?;
    Some(version.trim_end_matches('"').to_owned())
}

impl Rivals {
    /// Evaluates the gates, which compare with the loops in `ours`.
    pub(super) fn evaluate(&self, ours: &[Row]) -> Vec<Verdict> {
        let factors = FACTORS.iter();
        let mut verdicts: Vec<Verdict> = factors.map(|factor| self.evaluate_factor(*factor, ours)).collect();
        let differs = |row: &&Row| {
            let c = find(ours, &row.name).and_then(|row| row.checksums.get(REFERENCE));
            row.checksums.values().any(|checksum| Some(checksum) != c)
        };
        let differing =
            self.rows.iter().filter(differs).map(|row| format!("{} {:?}", row.name, row.checksums)).collect();
        verdicts.push(gates::expect_none("loops of other crates whose checksum differs from C's", differing));
        verdicts
    }

    fn evaluate_factor(&self, (name, variant, factor): (&str, &str, f64), ours: &[Row]) -> Verdict {
        let figure = |rows: &[Row], variant| find(rows, name)?.instructions.get(variant).copied();
        let (measured, met) = match (figure(&self.rows, variant), figure(ours, "raw")) {
            (Some(theirs), Some(own)) => {
                (format!("{:.2} ({theirs:.2} / {own:.2})", theirs / own), theirs >= own * factor)
            }
            _ => ("not measured".to_owned(), false),
        };
        let title = VARIANTS.iter().find(|(name, _)| *name == variant).map_or(variant, |(_, title)| *title);
        let gate = Gate { name: format!("{name}: {title} / raw"), limit: format!("≥ {factor}"), measured, met };
        Verdict { gate, complaint: (!met).then(|| "the ratio is below its limit".to_owned()) }
    }

    /// A table of instructions, with C and rdma-safe for comparison, and a table of allocator calls.
    pub(super) fn tables(&self, ours: &[Row]) -> [Table; 2] {
        let c = (REFERENCE, format!("C {REFERENCE}"));
        let columns = OURS.iter().chain(&VARIANTS).map(|(variant, title)| (*variant, (*title).to_owned()));
        let (variants, titles): (Vec<&str>, Vec<String>) = std::iter::once(c).chain(columns).unzip();
        let rows = self.rows.iter().map(|row| {
            let own = find(ours, &row.name);
            let figure = |variant: &str| row.instructions.get(variant).or_else(|| own?.instructions.get(variant));
            cells(&row.name, &variants, figure)
        });
        let instructions = Table {
            title: "Other crates".to_owned(),
            columns: std::iter::once("loop".to_owned()).chain(titles).collect(),
            rows: rows.collect(),
            notes: vec![NOTE.to_owned()],
        };
        let allocating = self.rows.iter().filter(|row| row.allocations_per_op.values().any(|calls| *calls > 0.0));
        let variants = VARIANTS.map(|(variant, _)| variant);
        let allocations = Table {
            title: "Other crates: allocator calls per operation".to_owned(),
            columns: std::iter::once("loop").chain(VARIANTS.map(|(_, title)| title)).map(str::to_owned).collect(),
            rows: allocating.map(|row| cells(&row.name, &variants, |name| row.allocations_per_op.get(name))).collect(),
            notes: vec!["Calls to allocate and to free. The other loops make no such calls.".to_owned()],
        };
        [instructions, allocations]
    }
}

/// A row of a table. A cell without a figure is empty.
fn cells<'row>(name: &str, variants: &[&str], figure: impl Fn(&str) -> Option<&'row f64>) -> Vec<String> {
    let cell = |variant: &&str| figure(variant).map(|figure| format!("{figure:.2}")).unwrap_or_default();
    std::iter::once(name.to_owned()).chain(variants.iter().map(cell)).collect()
}

fn find<'rows>(rows: &'rows [Row], name: &str) -> Option<&'rows Row> {
    rows.iter().find(|row| row.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, figures: &[(&str, f64)], checksum: u64) -> Row {
        let each = || figures.iter().map(|(variant, _)| (*variant).to_owned());
        Row {
            name: name.to_owned(),
            instructions: each().zip(figures.iter().map(|(_, figure)| *figure)).collect(),
            allocations: each().map(|variant| (variant, 0)).collect(),
            allocations_per_op: each().map(|variant| (variant, 0.0)).collect(),
            checksums: each().map(|variant| (variant, checksum)).collect(),
        }
    }

    fn rivals(rows: Vec<Row>) -> Rivals {
        Rivals { versions: BTreeMap::new(), rows }
    }

    #[test]
    fn a_ratio_below_its_limit_fails_the_gate() {
        let ours = [row("ex1", &[(REFERENCE, 40.0), ("raw", 40.0)], 7)];
        let evaluated = |theirs| rivals(vec![row("ex1", &[("sideway", theirs)], 7)]).evaluate(&ours).remove(0);
        let reached = evaluated(100.0);
        assert_eq!((reached.gate.measured.as_str(), reached.gate.met), ("2.50 (100.00 / 40.00)", true));
        assert!(reached.complaint.is_none());
        let missed = evaluated(99.99);
        assert!(!missed.gate.met && missed.complaint.is_some());
    }

    #[test]
    fn a_missing_measurement_fails_the_gate() {
        let verdicts = rivals(Vec::new()).evaluate(&[]);
        assert!(verdicts.iter().take(FACTORS.len()).all(|verdict| verdict.complaint.is_some()));
    }

    #[test]
    fn checksums_are_compared_with_those_of_c() {
        let ours = [row("rv1", &[(REFERENCE, 18.0), ("raw", 15.0)], 7)];
        let differs = |checksum| rivals(vec![row("rv1", &[("ibverbs", 1.0)], checksum)]).evaluate(&ours).pop().unwrap();
        assert!(differs(7).gate.met && !differs(8).gate.met);
    }

    #[test]
    fn results_of_several_programs_for_one_loop_share_a_row() {
        let mut rows = Vec::new();
        merge(&mut rows, row("rv1", &[("sideway", 1.0)], 7));
        merge(&mut rows, row("rv1", &[("ibverbs", 2.0)], 7));
        merge(&mut rows, row("ex1", &[("sideway", 3.0)], 7));
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0].instructions, [("ibverbs".to_owned(), 2.0), ("sideway".to_owned(), 1.0)].into());
    }

    #[test]
    fn a_table_has_a_cell_for_each_variant_of_a_row() {
        let ours = [row("rv1", &[(REFERENCE, 18.0), ("raw", 15.0)], 7)];
        let mut rv1 = row("rv1", &[("sideway", 574.0), ("ibverbs", 22.5)], 7);
        rv1.allocations_per_op.insert("sideway".to_owned(), 4.0);
        let [instructions, allocations] = rivals(vec![rv1, row("in1", &[("sideway", 54.0)], 7)]).tables(&ours);
        assert_eq!(instructions.rows[0], ["rv1", "18.00", "15.00", "", "574.00", "", "", "22.50"]);
        assert_eq!(allocations.rows, [["rv1", "4.00", "", "", "0.00"]]);
        for table in [instructions, allocations] {
            assert_eq!(table.columns.len(), table.rows[0].len());
        }
    }

    #[test]
    fn the_library_path_links_to_the_latest_stub() {
        let target = std::env::temp_dir().join(format!("xtask-rivals-{}", std::process::id()));
        let stubs = [target.join("first.so"), target.join("second.so")];
        for stub in &stubs {
            let libraries = library_path(&target, stub).unwrap();
            for name in ["libibverbs.so", "libibverbs.so.1"] {
                assert_eq!(fs::read_link(libraries.join(name)).unwrap(), *stub);
            }
        }
        fs::remove_dir_all(target).unwrap();
    }

    #[test]
    fn a_version_is_found_by_the_whole_package_name() {
        let lock = "[[package]]\nname = \"ibverbs-sys\"\nversion = \"0.3.2\"\n\n\
                    [[package]]\nname = \"ibverbs\"\nversion = \"0.9.2\"\n";
        assert_eq!(version(lock, "ibverbs").as_deref(), Some("0.9.2"));
        assert_eq!(version(lock, "sideway"), None);
    }
}
