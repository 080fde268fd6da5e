//! Reads profiles of callgrind: <https://valgrind.org/docs/manual/cl-format.html>.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::is_provider;

/// Prefix of the line with the name that the program gave to a profile.
const TRIGGER: &str = "desc: Trigger: Client Request: ";

/// Reads the profiles in `directory`: instructions outside the provider, by profile name.
pub(super) fn read(directory: &Path, provider: &Path) -> Result<BTreeMap<String, u64>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension.to_string_lossy().parse::<u32>().is_ok()) {
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            if let Some((name, instructions)) = parse(&text, provider) {
                found.insert(name, instructions);
            }
        }
    }
    Ok(found)
}

fn parse(text: &str, provider: &Path) -> Option<(String, u64)> {
    let name = text.lines().find_map(|line| line.strip_prefix(TRIGGER))?;
    // An object is named by its number. Its path follows the number at the first mention only.
    let mut objects: HashMap<&str, &str> = HashMap::new();
    let (mut counts, mut is_call, mut sum) = (true, false, 0);
    for line in text.lines() {
        if let Some((key, value)) = line.split_once("ob=").filter(|(key, _)| matches!(*key, "" | "c")) {
            let (number, path) = value.split_once(' ').unwrap_or((value, ""));
            if !path.is_empty() {
                objects.insert(number, path);
            }
            if key.is_empty() {
                counts = objects.get(number).is_none_or(|path| !is_provider(path, provider));
            }
        } else if line.starts_with("calls=") {
            is_call = true;
        } else if line.starts_with(|c: char| c.is_ascii_digit()) {
            // The line after `calls=` is the inclusive cost of the callee, which the callee's own lines count already.
            if !std::mem::take(&mut is_call) && counts {
                sum += line.split(' ').nth(1).and_then(|cost| cost.parse::<u64>().ok()).unwrap_or(0);
            }
        }
    }
    Some((name.to_owned(), sum))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn provider_instructions_and_inclusive_call_costs_are_not_counted() {
        let text = "\
version: 1
desc: Trigger: Client Request: raw ex1 1600

events: Ir
summary: 1160

ob=(1) /target/release/rdma-overhead
fl=(1) ???
fn=(1) loop_raw_ex1
0 100
cob=(2) /target/release/librdma_stub.so
cfn=(2) wr_start
calls=1600 0
0 1000

ob=(2)
fn=(2)
0 1000

ob=(1)
fn=(3) cold
0 60
";
        assert_eq!(parse(text, Path::new("/target/release/librdma_stub.so")), Some(("raw ex1 1600".to_owned(), 160)));
        assert_eq!(parse("desc: Trigger: Program termination\n", Path::new("")), None);
    }
}
