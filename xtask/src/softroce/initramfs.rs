//! The guest's first file system: this very program as init, the libraries it is linked with, and the modules that
//! make the real root reachable.
//!
//! Why not virtme-ng: with it a guest that panics says nothing (the console and the command's standard error are one
//! stream, so it can only be silenced or mixed), a killed `vng` leaves its QEMU running, and it wants udev, kmod and
//! busybox installed on the host. With our own init the guest also boots in half the time.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::MemfdFlags;

use super::config::Config;
use super::cpio::Archive;

/// Where this program is in the initramfs.
pub(crate) const INIT: &str = "/xtask";
/// Where the guest finds its [`Config`].
pub(crate) const CONFIG: &str = "/config.json";
/// Where the modules are, named so that their order is the order of loading.
pub(crate) const MODULES: &str = "/modules";
/// Where the libraries are.
pub(crate) const LIBRARIES: &str = "/lib";

/// An initramfs in memory, so that nothing is left behind however this program ends.
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
                // The kernel looks for the dynamic linker under the name that is written in the program.
                if name.starts_with("ld-linux") {
                    archive.file(&format!("/lib64/{name}"), &content);
                }
            }
        }
        for (index, module) in modules.iter().enumerate() {
            // The ending tells how it is compressed.
            let ending = module.extension().unwrap_or_default().to_string_lossy();
            archive.file(&format!("{MODULES}/{index:02}.{ending}"), &read(module)?);
        }
        archive.file(CONFIG, &serde_json::to_vec(config)?);

        let mut file = File::from(rustix::fs::memfd_create("initramfs", MemfdFlags::CLOEXEC)?);
        file.write_all(&archive.finish())?;
        Ok(Self(file))
    }

    /// A path that a child process that inherits [`Initramfs::fd`] can open.
    pub(crate) fn path(&self) -> String {
        format!("/proc/self/fd/{}", self.fd())
    }

    /// The descriptor to be inherited.
    pub(crate) fn fd(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// The shared libraries of this process, the dynamic linker among them.
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
    fn libraries_are_the_shared_objects_among_the_mappings() {
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
