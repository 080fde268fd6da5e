//! The machine and the tool versions that a result was measured with.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use crate::process;

/// Programs whose version matters, with the command that prints it.
const PROGRAMS: &[(&str, &[&str])] = &[
    ("rustc", &["rustc", "--version"]),
    ("gcc", &["gcc", "--version"]),
    ("clang", &["clang", "--version"]),
    ("QEMU", &["qemu-system-x86_64", "--version"]),
    ("commit", &["git", "describe", "--always", "--dirty", "--abbrev=12"]),
];

/// The processor, the kernel, and the versions of the installed [`PROGRAMS`].
pub(crate) fn collect() -> BTreeMap<String, String> {
    let mut facts = BTreeMap::new();
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    facts.insert("machine".to_owned(), machine(&cpuinfo));
    let kernel = rustix::system::uname();
    facts.insert("kernel".to_owned(), format!("Linux {}", kernel.release().to_string_lossy()));
    for (name, words) in PROGRAMS {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).current_dir(crate::workspace::root()).env("LC_ALL", "C.UTF-8");
        // A program that is not installed had no part in the measurement.
        if let Some(line) = process::output(&mut command).ok().as_deref().and_then(|output| output.lines().next()) {
            facts.insert((*name).to_owned(), version(line).to_owned());
        }
    }
    facts
}

/// Today's date in UTC, such as `2026-11-21`.
pub(crate) fn today() -> anyhow::Result<String> {
    Ok(process::output(Command::new("date").args(["-u", "+%F"]))?.trim().to_owned())
}

/// Model and number of the processors that `/proc/cpuinfo` lists.
fn machine(cpuinfo: &str) -> String {
    let values = |key: &str| {
        let key = key.to_owned();
        cpuinfo.lines().filter_map(move |line| {
            let (name, value) = line.split_once(':')?;
            (name.trim() == key).then(|| value.trim().to_owned())
        })
    };
    let model = values("model name").next().unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    let count = values("processor").count();
    let virtual_machine = values("flags").next().is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor"));
    let kind = if virtual_machine { ", virtual" } else { "" };
    format!("{model}, {count} {}{kind}", if count == 1 { "processor" } else { "processors" })
}

/// Version in a line such as `rustc 1.95.0 (59807616e 2026-04-14)`: the line without the program's name.
fn version(line: &str) -> &str {
    let rest = line.split_once("version ").map_or(line, |(_, version)| version);
    match rest.rsplit_once(") ") {
        Some((distribution, version)) if distribution.starts_with("gcc (") => version,
        _ => rest.trim_start_matches("rustc "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted_and_a_virtual_machine_is_marked() {
        let one = "processor\t: 0\nmodel name\t: Some CPU @ 2.5GHz\nflags\t\t: fpu hypervisor avx\n\n";
        let two = format!("{one}{}", one.replace(": 0", ": 1"));
        assert_eq!(machine(&two), "Some CPU @ 2.5GHz, 2 processors, virtual");
        assert_eq!(machine(&one.replace(" hypervisor", "")), "Some CPU @ 2.5GHz, 1 processor");
    }

    #[test]
    fn the_version_follows_the_name_of_the_program() {
        assert_eq!(version("rustc 1.95.0 (59807616e 2026-04-14)"), "1.95.0 (59807616e 2026-04-14)");
        assert_eq!(version("gcc (Debian 12.2.0-14) 12.2.0"), "12.2.0");
        assert_eq!(version("Debian clang version 14.0.6"), "14.0.6");
        assert_eq!(version("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)"), "7.2.22 (Debian 1:7.2+dfsg-7)");
    }
}
