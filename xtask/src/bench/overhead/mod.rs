//! `cargo xtask bench overhead`: instructions that a caller of verbs executes per operation, compared with C.

pub(super) mod gates;
mod panics;
mod profile;
mod report;
mod rivals;
mod tools;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use self::gates::Verdict;
use self::rivals::Rivals;
use self::tools::Tools;
use crate::{process, workspace};

/// Count the caller's instructions per operation: in C, over rdma-sys, and over both APIs of rdma-safe
///
/// The loops run in the release profile over a stub provider, which does a provider's work on memory and nothing else.
/// callgrind counts the instructions outside the provider. The counts are the same on every run with the same compilers.
/// The exit status is 1 if a count exceeds its limit, or if a loop allocates, can panic, or returns another checksum than C.
///
/// The loops: rvN posts receives, in1 posts an inline send of 32 bytes without a completion, em polls an empty queue, poll
/// takes one of sixteen completions and reads five fields, ud_send sends a datagram. send and recv post an owned buffer and
/// get it back. qp and mr create and destroy an object, including the provider's allocations. The others post and poll,
/// one operation at a time or sixteen. ex means the extended interface, cl the classic one.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Also count the loops over the published crates sideway and ibverbs
    ///
    /// Compiling them takes minutes, and needs cmake, libclang, and libnl with its headers. The result then includes tables
    /// of these crates. Gates compare the instruction counts of sideway and the raw API. The exit status is 1 if such a
    /// gate is not met, or if one of their loops returns another checksum than C. Their allocations are shown, not checked.
    #[arg(long)]
    rivals: bool,
    /// Where to write the result, instead of target/bench/overhead.json
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The C compiler that the gates compare with. clang and rustc share a code generator.
const REFERENCE: &str = "clang";

/// Rows of the control path, which may allocate and panic.
const CONTROL: [&str; 2] = ["qp", "mr"];

/// Results of all loops.
#[derive(Debug)]
pub(crate) struct Measured {
    tools: Tools,
    rows: Vec<Row>,
    rivals: Option<Rivals>,
    pub(crate) verdicts: Vec<Verdict>,
}

/// A loop in all its variants.
#[derive(Debug)]
struct Row {
    name: String,
    /// Instructions per operation, by variant.
    instructions: BTreeMap<String, f64>,
    /// Allocator calls in the longer run, by variant.
    allocations: BTreeMap<String, u64>,
    /// Allocator calls per operation, by variant.
    allocations_per_op: BTreeMap<String, f64>,
    /// Checksum of the longer run, by variant.
    checksums: BTreeMap<String, u64>,
}

pub(crate) fn main(args: &Args) -> Result<i32> {
    let tools = tools::find()?;
    if args.rivals {
        rivals::prepare()?;
    }
    let measured = measure(tools, args.rivals)?;
    let benchmark = report::benchmark(&measured)?;
    report::print(&measured, &benchmark);
    benchmark.write(args.json.as_deref(), "overhead")?;
    Ok(i32::from(measured.verdicts.iter().any(|verdict| verdict.complaint.is_some())))
}

/// Measures for the test command. The inner error is the reason why this machine cannot measure.
pub(crate) fn gates() -> Result<Result<Measured, String>> {
    match tools::find() {
        Ok(tools) => measure(tools, false).map(Ok),
        Err(error) => Ok(Err(format!("{error:#}"))),
    }
}

fn measure(tools: Tools, with_rivals: bool) -> Result<Measured> {
    let directory = workspace::target_dir()?.join("bench/overhead");
    let (program, stub) = build()?;
    std::fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let mut loops = Vec::new();
    for compiler in &tools.compilers {
        let library = directory.join(format!("libloops-{}.so", compiler.name));
        let source = workspace::root().join("benches/overhead/loops.c");
        let mut command = Command::new(&compiler.path);
        command.args(["-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-I"]).arg(&tools.headers);
        process::output(command.arg(source).arg("-o").arg(&library))?;
        loops.push(format!("{}={}", compiler.name, library.display()));
    }
    let run = Run { directory: &directory.join("profiles"), program: &program, arguments: &loops, stub: &stub };
    let rows = run.rows(&tools.valgrind, ("RDMA_SYS_LIBIBVERBS", &stub))?;
    let mut verdicts = gates::evaluate(&rows, panics::reachable(&program, &rows)?);
    let rivals = with_rivals.then(|| rivals::measure(&tools, &stub)).transpose()?;
    if let Some(rivals) = &rivals {
        verdicts.extend(rivals.evaluate(&rows));
    }
    Ok(Measured { tools, rows, rivals, verdicts })
}

/// Instructions per operation of the loops of `program`, by loop and variant, of all code.
pub(super) fn of_program(program: &Path, arguments: &[String]) -> Result<Vec<(String, BTreeMap<String, f64>)>> {
    let valgrind = tools::tool("valgrind", "valgrind")?;
    let directory = program.with_extension("profiles");
    let run = Run { directory: &directory, program, arguments, stub: Path::new("none") };
    let rows = run.rows(&valgrind, ("LC_ALL", Path::new("C")))?;
    Ok(rows.into_iter().map(|row| (row.name, row.instructions)).collect())
}

/// A run of a program that measures loops.
struct Run<'run> {
    /// Where callgrind writes the profiles.
    directory: &'run Path,
    program: &'run Path,
    arguments: &'run [String],
    /// The stub provider, whose instructions are not counted.
    stub: &'run Path,
}

impl Run<'_> {
    /// Runs the program under callgrind, with `variable` as its only environment variable so that results repeat.
    fn rows(&self, valgrind: &Path, variable: (&str, &Path)) -> Result<Vec<Row>> {
        // Leftover profiles of an earlier run would be read as profiles of this one.
        _ = std::fs::remove_dir_all(self.directory);
        std::fs::create_dir_all(self.directory)
            .with_context(|| format!("cannot create {}", self.directory.display()))?;
        let mut command = Command::new(valgrind);
        command.args(["--tool=callgrind", "--collect-atstart=no", "--dump-line=no", "--compress-pos=no"]);
        command.arg(format!("--callgrind-out-file={}", self.directory.join("profile").display()));
        command.arg(self.program).args(self.arguments);
        command.env_clear().env(variable.0, variable.1);
        let runs = process::output(&mut command)?;
        rows(&runs, &profile::read(self.directory, self.stub)?)
    }
}

/// Compiles the program with the loops and the stub provider, and returns their paths.
fn build() -> Result<(PathBuf, PathBuf)> {
    let mut command = Command::new(workspace::cargo());
    command.args(["build", "--release", "--package", "rdma-overhead", "--package", "rdma-stub"]);
    process::run(command.current_dir(workspace::root()))?;
    let release = workspace::target_dir()?.join("release");
    Ok((release.join("rdma-overhead"), release.join("librdma_stub.so")))
}

/// Parses the program's output: per run a line with variant, loop, number of operations, checksum and allocations.
fn rows(runs: &str, profiles: &BTreeMap<String, u64>) -> Result<Vec<Row>> {
    let mut rows: Vec<Row> = Vec::new();
    let mut shorter: BTreeMap<(String, String), (u64, u64, u64)> = BTreeMap::new();
    for line in runs.lines() {
        let fields: Vec<&str> = line.split('\t').collect();
        let [variant, name, count, checksum, allocations] = fields[..] else { bail!("unexpected output: {line}") };
        let run = format!("{variant} {name} {count}");
        let instructions = *profiles.get(&run).with_context(|| format!("callgrind wrote no profile of {run}"))?;
        let (count, allocations): (u64, u64) = (count.parse()?, allocations.parse()?);
        let key = (variant.to_owned(), name.to_owned());
        let Some((shorter, before, allocated)) = shorter.remove(&key) else {
            shorter.insert(key, (count, instructions, allocations));
            continue;
        };
        if rows.last().is_none_or(|row| row.name != name) {
            rows.push(Row {
                name: name.to_owned(),
                instructions: BTreeMap::new(),
                allocations: BTreeMap::new(),
                allocations_per_op: BTreeMap::new(),
                checksums: BTreeMap::new(),
            });
        }
        let Some(row) = rows.last_mut() else { continue };
        let each = |total: u64, before: u64| (total as f64 - before as f64) / (count - shorter) as f64;
        row.instructions.insert(variant.to_owned(), each(instructions, before));
        row.allocations.insert(variant.to_owned(), allocations);
        row.allocations_per_op.insert(variant.to_owned(), each(allocations, allocated));
        row.checksums.insert(variant.to_owned(), checksum.parse()?);
    }
    Ok(rows)
}

/// Whether `path` is the stub provider, whose instructions are not counted.
fn is_provider(path: &str, stub: &Path) -> bool {
    Path::new(path) == stub
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fixed_cost_of_a_loop_is_subtracted() {
        let runs = "gcc\tex1\t1600\t1\t3\ngcc\tex1\t17600\t2\t32003\nraw\tex1\t1600\t1\t0\nraw\tex1\t17600\t2\t0\n";
        let profiles =
            [("gcc ex1 1600", 1700), ("gcc ex1 17600", 33700), ("raw ex1 1600", 99), ("raw ex1 17600", 8099)];
        let profiles = profiles.map(|(name, count)| (name.to_owned(), count)).into();
        let rows = rows(runs, &profiles).unwrap();
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].instructions, [("gcc".to_owned(), 2.0), ("raw".to_owned(), 0.5)].into());
        assert_eq!(rows[0].allocations["gcc"], 32003);
        assert_eq!(rows[0].allocations_per_op, [("gcc".to_owned(), 2.0), ("raw".to_owned(), 0.0)].into());
    }

    #[test]
    fn a_run_without_a_profile_is_an_error() {
        assert!(rows("gcc\tex1\t1600\t1\t0\n", &BTreeMap::new()).unwrap_err().to_string().contains("gcc ex1 1600"));
    }
}
