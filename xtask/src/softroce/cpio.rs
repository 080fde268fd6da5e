//! The archive format of an initramfs: cpio "newc".
//!
//! The kernel documents it in Documentation/driver-api/early-userspace/buffer-format.rst.

use std::collections::BTreeSet;
use std::path::Path;

/// An archive under construction. Parent directories are added automatically.
#[derive(Debug, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    directories: BTreeSet<String>,
    inodes: u32,
}

impl Archive {
    /// Adds a directory and its parents.
    pub(crate) fn directory(&mut self, path: &str) {
        let path = path.trim_matches('/');
        if path.is_empty() || self.directories.contains(path) {
            return;
        }
        self.parents(path);
        self.directories.insert(path.to_owned());
        self.entry(path, 0o040_755, &[]);
    }

    /// Adds an executable file and its parent directories.
    pub(crate) fn file(&mut self, path: &str, content: &[u8]) {
        let path = path.trim_matches('/');
        self.parents(path);
        self.entry(path, 0o100_755, content);
    }

    /// Finishes the archive and returns its bytes.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn parents(&mut self, path: &str) {
        if let Some(parent) = Path::new(path).parent().and_then(Path::to_str) {
            self.directory(parent);
        }
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.inodes += 1;
        let size = u32::try_from(content.len()).unwrap_or(u32::MAX);
        let name_size = u32::try_from(name.len() + 1).unwrap_or(u32::MAX);
        // ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor, namesize, check
        let fields = [self.inodes, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names, modes and contents of the entries of an archive.
    fn parse(mut bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut entries = Vec::new();
        loop {
            assert_eq!(&bytes[..6], b"070701");
            let field = |index: usize| {
                let at = 6 + 8 * index;
                u32::from_str_radix(std::str::from_utf8(&bytes[at..at + 8]).unwrap(), 16).unwrap()
            };
            let (mode, size, name_size) = (field(1), field(6) as usize, field(11) as usize);
            let name = String::from_utf8(bytes[110..110 + name_size - 1].to_vec()).unwrap();
            let start = (110 + name_size).next_multiple_of(4);
            let content = bytes[start..start + size].to_vec();
            if name == "TRAILER!!!" {
                return entries;
            }
            bytes = &bytes[(start + size).next_multiple_of(4)..];
            entries.push((name, mode, content));
        }
    }

    #[test]
    fn parents_are_added_once_and_before_their_files() {
        let mut archive = Archive::default();
        archive.file("/lib/x/libc.so.6", b"elf");
        archive.file("/lib/x/libm.so.6", b"");
        archive.directory("dev");
        let entries = parse(&archive.finish());
        let names: Vec<_> = entries.iter().map(|entry| entry.0.as_str()).collect();
        assert_eq!(names, ["lib", "lib/x", "lib/x/libc.so.6", "lib/x/libm.so.6", "dev"]);
        assert_eq!(entries[2].1, 0o100_755);
        assert_eq!(entries[2].2, b"elf");
    }
}
