//! The guest's initial file system: this program as init, its shared libraries, and the modules for mounting the real root.
//!
//! virtme-ng is not used for these reasons. It merges the console and the command's standard error into one stream, so the
//! message of a kernel panic is either suppressed or mixed with output. A killed `vng` leaves its QEMU running. It needs
//! udev, kmod and busybox on the host. With our own init the guest also boots in half the time.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::MemfdFlags;

use super::config::Config;
use super::cpio::Archive;

/// Path of this program in the initramfs.
pub(crate) const INIT: &str = "/xtask";
/// Path of the [`Config`].
pub(crate) const CONFIG: &str = "/config.json";
/// Directory of the modules. Their file names sort in load order.
pub(crate) const MODULES: &str = "/modules";
/// Directory of the shared libraries.
pub(crate) const LIBRARIES: &str = "/lib";

/// An initramfs in memory, so that no file is left behind when this program is killed.
#[derive(Debug)]
pub(crate) struct Initramfs(File);

impl Initramfs {
    /// Packs `modules` and `config` with this program.
    pub(crate) fn pack(modules: &[PathBuf], config: &Config) -> Result<Self> {
        let mut archive = Archive::default();
        for directory in ["dev", "proc", "sys", "run", "base", "overlays", "changes", "root"] {
            archive.directory(directory);
        }
        archive.file(INIT, &read(Path::new(super::THIS_PROGRAM))?);
        for library in loaded_libraries()? {
            if let Some(name) = library.file_name().and_then(|name| name.to_str()) {
                let content = read(&library)?;
                archive.file(&format!("{LIBRARIES}/{name}"), &content);
                // The kernel loads the dynamic linker from the path in the program's header.
                if name.starts_with("ld-linux") {
                    archive.file(&format!("/lib64/{name}"), &content);
                }
            }
        }
        for (index, module) in modules.iter().enumerate() {
            // The extension indicates the compression.
            let extension = module.extension().unwrap_or_default().to_string_lossy();
            archive.file(&format!("{MODULES}/{index:02}.{extension}"), &read(module)?);
        }
        archive.file(CONFIG, &serde_json::to_vec(config)?);

        let mut file = File::from(rustix::fs::memfd_create("initramfs", MemfdFlags::CLOEXEC)?);
        file.write_all(&archive.finish())?;
        Ok(Self(file))
    }

    /// A path that a child process can open if it inherits [`Initramfs::fd`].
    pub(crate) fn path(&self) -> String {
        format!("/proc/self/fd/{}", self.fd())
    }

    /// The descriptor, for a child process to inherit.
    pub(crate) fn fd(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Shared libraries of this process, including the dynamic linker.
fn loaded_libraries() -> Result<BTreeSet<PathBuf>> {
    Ok(libraries_in(&fs::read_to_string("/proc/self/maps")?))
}

fn libraries_in(maps: &str) -> BTreeSet<PathBuf> {
    maps.lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]))
        .filter(|path| path.contains(".so") && !path.ends_with(" (deleted)"))
        .map(PathBuf::from)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_found_in_the_memory_map() {
        let maps = "\
55d0-55d1 r--p 00000000 08:01 1 /usr/bin/xtask
7f00-7f01 r-xp 00000000 08:01 2 /usr/lib/x86_64-linux-gnu/libc.so.6
7f01-7f02 r--p 00000000 08:01 2 /usr/lib/x86_64-linux-gnu/libc.so.6
7f03-7f04 r-xp 00000000 08:01 3 /usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2
7ffd-7ffe rw-p 00000000 00:00 0 [stack]
";
        let libraries = libraries_in(maps);
        let names: Vec<_> = libraries.iter().filter_map(|path| path.file_name()).collect();
        assert_eq!(names, ["ld-linux-x86-64.so.2", "libc.so.6"]);
    }
}
