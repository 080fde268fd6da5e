//! Searches the disassembly of the program for calls from the loops to functions that panic.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use super::{CONTROL, Row};
use crate::process;

/// Parts of the names of functions that panic.
const PANICS: [&str; 6] =
    ["core::panicking::", "unwrap_failed", "expect_failed", "slice_index", "slice::index::", "handle_alloc_error"];

/// Matches of [`PANICS`] that are reached only while the stack is unwinding already.
const UNWINDING: [&str; 2] = ["panic_in_cleanup", "panic_cannot_unwind"];

/// Functions outside the data path, which may panic. The search does not follow calls to them.
const PRUNED: &[&str] = &[
    // Drops of errors and of buffers that the caller does not keep.
    "drop_in_place",
    "drop_slow",
    "drop_staged",
    "drop_deferred",
    // The clock, which idle polls read. It panics only if the kernel has no monotonic clock.
    "time::Instant>::now",
    "time::Instant>::duration_since",
    // Cleanup after a provider error.
    "endpoint::batch::failed",
    "::many_failed",
    // Buffers that do not take the fast path.
    "::send_slowly",
    "::poison",
];

/// Loops of the data path that can panic, each with the call path to the panic.
pub(super) fn reachable(program: &Path, rows: &[Row]) -> Result<Vec<String>> {
    let code = process::output(Command::new("objdump").args(["-d", "-C", "--no-show-raw-insn"]).arg(program))?;
    let slots = process::output(Command::new("objdump").args(["-R", "-C"]).arg(program))?;
    let symbols = process::output(Command::new("nm").arg(program))?;
    let program = Program::read(&code, &slots);
    let mut found = Vec::new();
    let loops = rows.iter().filter(|row| !CONTROL.contains(&row.name.as_str()));
    for (row, variant) in loops.flat_map(|row| row.instructions.keys().map(move |variant| (row, variant))) {
        let name = format!("loop_{variant}_{}", row.name);
        if !["sys", "raw", "any", "owned", "batch"].contains(&variant.as_str()) {
            continue;
        }
        let address = address_of(&symbols, &name).with_context(|| format!("the program has no {name}"))?;
        if let Some(path) = program.path_to_panic(address) {
            found.push(format!("{name}: {}", path.join(" -> ")));
        }
    }
    Ok(found)
}

/// Address of the symbol `name` in the output of `nm`. Loops that compile to the same code share an address.
fn address_of(symbols: &str, name: &str) -> Option<u64> {
    let line = symbols.lines().find(|line| line.rsplit(' ').next() == Some(name))?;
    u64::from_str_radix(line.split(' ').next()?, 16).ok()
}

#[derive(Debug, Default)]
struct Program {
    functions: BTreeMap<u64, Function>,
}

#[derive(Debug)]
struct Function {
    name: String,
    /// Target addresses of the function's calls and jumps.
    targets: BTreeSet<u64>,
}

impl Program {
    fn read(code: &str, slots: &str) -> Self {
        let slots: BTreeMap<u64, u64> = slots.lines().filter_map(slot).collect();
        let mut functions: BTreeMap<u64, Function> = BTreeMap::new();
        let mut current = None;
        for line in code.lines() {
            if let Some((address, name)) = header(line) {
                functions.insert(address, Function { name: name.to_owned(), targets: BTreeSet::new() });
                current = Some(address);
            } else if let Some(function) = current.and_then(|address| functions.get_mut(&address)) {
                function.targets.extend(target(line, &slots));
            }
        }
        Program { functions }
    }

    /// The function that contains `address`, with its start address.
    fn at(&self, address: u64) -> Option<(u64, &Function)> {
        self.functions.range(..=address).next_back().map(|(start, function)| (*start, function))
    }

    /// Names of the functions on a call path from the function at `from` to one that panics, without the first.
    fn path_to_panic(&self, from: u64) -> Option<Vec<&str>> {
        let mut seen = BTreeSet::from([from]);
        let mut paths = vec![vec![from]];
        while let Some(path) = paths.pop() {
            let Some((_, function)) = path.last().and_then(|address| self.at(*address)) else { continue };
            for target in &function.targets {
                let Some((start, callee)) = self.at(*target) else { continue };
                let is_any = |parts: &[&str]| parts.iter().any(|part| callee.name.contains(part));
                if !seen.insert(start) || is_any(PRUNED) || is_any(&UNWINDING) {
                    continue;
                }
                if is_any(&PANICS) {
                    let names = path.iter().skip(1).filter_map(|address| self.at(*address));
                    return Some(
                        names.map(|(_, function)| function.name.as_str()).chain([callee.name.as_str()]).collect(),
                    );
                }
                paths.push(path.iter().copied().chain([start]).collect());
            }
        }
        None
    }
}

/// Address and name in a line such as `0000000000028bd0 <name>:`.
fn header(line: &str) -> Option<(u64, &str)> {
    let (address, name) = line.strip_suffix(">:")?.split_once(" <")?;
    Some((u64::from_str_radix(address, 16).ok()?, name))
}

/// Address and value of a slot of the global offset table.
///
/// The line looks like `00000000000923a0 R_X86_64_RELATIVE  *ABS*+0x38bd0`.
fn slot(line: &str) -> Option<(u64, u64)> {
    let (address, rest) = line.split_once(' ')?;
    let value = rest.rsplit_once("*ABS*+0x")?.1;
    Some((u64::from_str_radix(address, 16).ok()?, u64::from_str_radix(value, 16).ok()?))
}

/// Target address of a call or a jump.
///
/// The instruction is direct, as in `call 38bd0 <name>`, or goes through the global offset table, as in
/// `call *0x6b944(%rip)        # 923b0 <_DYNAMIC+0x250>`. Calls through other pointers go to the provider.
fn target(line: &str, slots: &BTreeMap<u64, u64>) -> Option<u64> {
    let instruction = line.split_once(":\t")?.1;
    let (mnemonic, operands) = instruction.split_once(' ')?;
    if !(mnemonic.starts_with("call") || mnemonic.starts_with('j') || mnemonic == "b" || mnemonic == "bl") {
        return None;
    }
    if let Some((_, slot)) = operands.split_once("# ") {
        let slot = u64::from_str_radix(slot.split(' ').next()?, 16).ok()?;
        return slots.get(&slot).copied();
    }
    u64::from_str_radix(operands.trim_start().split(' ').next()?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: &str = "
0000000000001000 <loop_raw_ex1>:
    1000:\tcall   *0x140(%rdi)
    1004:\tje     1000 <loop_raw_ex1>
    1008:\tcall   *0x6b944(%rip)        # 923a0 <_DYNAMIC+0x250>
    100c:\tcall   4000 <core::ptr::drop_in_place<x>>

0000000000002000 <helper>:
    2000:\tjmp    3000 <core::panicking::panic_bounds_check>

0000000000003000 <core::panicking::panic_bounds_check>:
    3000:\tud2

0000000000004000 <core::ptr::drop_in_place<x>>:
    4000:\tcall   3000 <core::panicking::panic_bounds_check>
";

    #[test]
    fn a_panic_is_found_through_a_call() {
        let program = Program::read(CODE, "00000000000923a0 R_X86_64_RELATIVE  *ABS*+0x2000\n");
        assert_eq!(program.path_to_panic(0x1000).unwrap(), ["helper", "core::panicking::panic_bounds_check"]);
    }

    #[test]
    fn calls_to_pruned_functions_are_not_followed() {
        assert_eq!(Program::read(CODE, "").path_to_panic(0x1000), None);
    }

    #[test]
    fn loops_with_the_same_code_are_found_by_their_own_names() {
        let symbols = "0000000000001000 T loop_raw_cl1\n0000000000001000 T loop_raw_ex1\n";
        assert_eq!(address_of(symbols, "loop_raw_ex1"), Some(0x1000));
        assert_eq!(address_of(symbols, "loop_raw"), None);
    }
}
