//! The files of a host from which the checks read.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A tree with `/sys`, `/proc` and `/dev`: that of this host, or one that a test has made.
#[derive(Debug)]
pub(crate) struct Host {
    root: PathBuf,
}

/// A file that cannot be read, and why.
#[derive(Debug, thiserror::Error)]
#[error("{path} cannot be read: {reason}")]
pub(crate) struct Unread {
    path: String,
    reason: io::Error,
}

impl Host {
    pub(crate) fn new(root: impl Into<PathBuf>) -> Host {
        Host { root: root.into() }
    }

    /// Where `path`, which begins with `/`, really is.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Content of a file, without white space around it.
    pub(crate) fn text(&self, path: &str) -> Result<String, Unread> {
        let bytes = fs::read(self.path(path)).map_err(|reason| Unread { path: path.into(), reason })?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// The number that a file holds, if it does.
    pub(crate) fn number(&self, path: &str) -> Option<u64> {
        self.text(path).ok()?.parse().ok()
    }

    /// Names in a directory, sorted; none when it is missing.
    pub(crate) fn names(&self, path: &str) -> Result<Vec<String>, Unread> {
        let entries = match fs::read_dir(self.path(path)) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(reason) => return Err(Unread { path: path.into(), reason }),
        };
        let mut names: Vec<_> =
            entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned())).collect();
        names.sort_by(|a, b| (a.len(), a).cmp(&(b.len(), b)));
        Ok(names)
    }

    pub(crate) fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// Last part of what a link points to.
    pub(crate) fn link_name(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.path(path)).ok()?;
        Some(Path::new(target.file_name()?).to_string_lossy().into_owned())
    }

    /// Whether this process may use a privileged call: `capabilities(7)`.
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

    /// The network interface below a port of RoCE, from its GID table.
    pub(crate) fn interface(&self, device: &str, port: &str) -> Option<String> {
        let directory = format!("/sys/class/infiniband/{device}/ports/{port}/gid_attrs/ndevs");
        let indices = self.names(&directory).ok()?;
        // Reading an empty entry fails.
        indices.iter().find_map(|index| self.text(&format!("{directory}/{index}")).ok().filter(|name| !name.is_empty()))
    }

    /// Whether a device speaks iWARP, which is not RoCE though its link layer is Ethernet.
    pub(crate) fn is_iwarp(&self, device: &str) -> bool {
        self.text(&format!("/sys/class/infiniband/{device}/node_type")).is_ok_and(|kind| kind.ends_with("RNIC"))
    }

    /// Whether a device is made of software: it hangs from no bus, or from that of the network card below it. rxe has a
    /// file that names its interface; siw has nothing but its usual name.
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

/// Bytes of memory as people name them.
pub(crate) fn amount(bytes: u64) -> String {
    let (unit, name) = match bytes {
        0x4000_0000.. => (30, "GiB"),
        0x10_0000.. => (20, "MiB"),
        _ => (10, "KiB"),
    };
    let text = format!("{:.1}", bytes as f64 / f64::from(1 << unit));
    format!("{} {name}", text.trim_end_matches(".0"))
}

/// Numbers of a list such as `0-3,8`.
pub(crate) fn cpu_list(text: &str) -> Vec<u32> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.trim().parse::<u32>(), last.trim().parse::<u32>()) {
            // No kernel has more processors; a file that says otherwise is not worth the memory.
            numbers.extend((first..=last).take(1 << 16));
        }
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn files_are_read_below_the_root() {
        let scratch = Scratch::new();
        scratch.write("/sys/a/one", " 17\n");
        scratch.write("/sys/a/ten", "x\n");
        scratch.write("/proc/self/status", "Name:\tx\nCapEff:\t0000000000004000\n");
        let host = Host::new(scratch.path(""));
        assert_eq!((host.number("/sys/a/one"), host.number("/sys/a/ten")), (Some(17), None));
        assert_eq!(host.names("/sys/a").unwrap(), ["one", "ten"]);
        assert!(host.names("/sys/none").unwrap().is_empty());
        assert!(host.text("/sys/none").unwrap_err().to_string().starts_with("/sys/none cannot be read: No such file"));
        assert!(host.has_capability(IPC_LOCK) && !host.has_capability(NET_ADMIN));
    }

    #[test]
    fn amounts_have_a_unit() {
        assert_eq!([65536, 8 << 20, 5 << 29].map(amount), ["64 KiB", "8 MiB", "2.5 GiB"]);
    }

    #[test]
    fn lists_of_processors_have_ranges() {
        assert_eq!(cpu_list("0-3,8\n"), [0, 1, 2, 3, 8]);
        assert!(cpu_list("").is_empty() && cpu_list("x-y").is_empty() && cpu_list("3-1").is_empty());
        assert_eq!(cpu_list("0-4294967295").len(), 1 << 16);
    }
}
