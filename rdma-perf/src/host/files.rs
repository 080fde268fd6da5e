//! Reads `/sys`, `/proc` and `/dev`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A directory tree with `/sys`, `/proc` and `/dev`: the root of this host, or a tree that a test has made.
#[derive(Debug)]
pub(crate) struct HostFiles {
    root: PathBuf,
}

/// A file that cannot be read, with the reason.
#[derive(Debug, thiserror::Error)]
#[error("{path} cannot be read: {reason}")]
pub(crate) struct ReadError {
    path: String,
    reason: io::Error,
}

impl HostFiles {
    pub(crate) fn new(root: impl Into<PathBuf>) -> HostFiles {
        HostFiles { root: root.into() }
    }

    /// The location of `path`, which begins with `/`, below the root.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Content of a file, without surrounding white space.
    pub(crate) fn text(&self, path: &str) -> Result<String, ReadError> {
        let bytes = fs::read(self.path(path)).map_err(|reason| ReadError { path: path.into(), reason })?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// The number in a file, if it holds one.
    pub(crate) fn number(&self, path: &str) -> Option<u64> {
        self.text(path).ok()?.parse().ok()
    }

    /// Names in a directory, sorted; empty if the directory is missing.
    pub(crate) fn names(&self, path: &str) -> Result<Vec<String>, ReadError> {
        let entries = match fs::read_dir(self.path(path)) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(reason) => return Err(ReadError { path: path.into(), reason }),
        };
        let mut names: Vec<_> =
            entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned())).collect();
        names.sort_by(|a, b| (a.len(), a).cmp(&(b.len(), b)));
        Ok(names)
    }

    pub(crate) fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// File name of a link's target.
    pub(crate) fn link_name(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.path(path)).ok()?;
        Some(Path::new(target.file_name()?).to_string_lossy().into_owned())
    }

    /// Whether this process has a capability: `capabilities(7)`.
    pub(crate) fn has_capability(&self, bit: u32) -> bool {
        let sets = self.status("CapEff").and_then(|text| u64::from_str_radix(&text, 16).ok());
        sets.is_some_and(|set| set >> bit & 1 != 0)
    }

    /// A field of `/proc/self/status`.
    pub(crate) fn status(&self, field: &str) -> Option<String> {
        let text = self.text("/proc/self/status").ok()?;
        let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
        Some(value.trim().to_owned())
    }

    /// The network interface below a RoCE port, from its GID table.
    pub(crate) fn interface(&self, device: &str, port: &str) -> Option<String> {
        let directory = format!("/sys/class/infiniband/{device}/ports/{port}/gid_attrs/ndevs");
        let indices = self.names(&directory).ok()?;
        // Reading an empty entry fails.
        indices.iter().find_map(|index| self.text(&format!("{directory}/{index}")).ok().filter(|name| !name.is_empty()))
    }

    /// Whether a device uses iWARP, which is not RoCE although its link layer is Ethernet.
    pub(crate) fn is_iwarp(&self, device: &str) -> bool {
        self.text(&format!("/sys/class/infiniband/{device}/node_type")).is_ok_and(|kind| kind.ends_with("RNIC"))
    }

    /// Whether a device is software.
    ///
    /// A software device has no bus device, or the bus device of its network card. rxe is recognized by the file `parent`, which
    /// names its interface, and siw only by its usual name.
    pub(crate) fn is_software(&self, device: &str) -> bool {
        let directory = format!("/sys/class/infiniband/{device}");
        device.starts_with("siw")
            || self.exists(&format!("{directory}/parent"))
            || !self.exists(&format!("{directory}/device"))
    }
}

/// `CAP_NET_ADMIN`
pub(crate) const NET_ADMIN: u32 = 12;
/// `CAP_IPC_LOCK`
pub(crate) const IPC_LOCK: u32 = 14;

/// Parses a list of numbers such as `0-3,8`.
pub(crate) fn cpu_list(text: &str) -> Vec<u32> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.trim().parse::<u32>(), last.trim().parse::<u32>()) {
            // Limits the memory for a malformed file. No kernel supports more processors.
            numbers.extend((first..=last).take(1 << 16));
        }
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::scratch::Scratch;

    #[test]
    fn files_are_read_below_the_root() {
        let scratch = Scratch::new();
        scratch.write("/sys/a/one", " 17\n");
        scratch.write("/sys/a/ten", "x\n");
        scratch.write("/proc/self/status", "Name:\tx\nCapEff:\t0000000000004000\n");
        let host = HostFiles::new(scratch.path(""));
        assert_eq!((host.number("/sys/a/one"), host.number("/sys/a/ten")), (Some(17), None));
        assert_eq!(host.names("/sys/a").unwrap(), ["one", "ten"]);
        assert!(host.names("/sys/none").unwrap().is_empty());
        assert!(host.text("/sys/none").unwrap_err().to_string().starts_with("/sys/none cannot be read: No such file"));
        assert!(host.has_capability(IPC_LOCK) && !host.has_capability(NET_ADMIN));
    }

    #[test]
    fn processor_lists_contain_ranges() {
        assert_eq!(cpu_list("0-3,8\n"), [0, 1, 2, 3, 8]);
        assert!(cpu_list("").is_empty() && cpu_list("x-y").is_empty() && cpu_list("3-1").is_empty());
        assert_eq!(cpu_list("0-4294967295").len(), 1 << 16);
    }
}
