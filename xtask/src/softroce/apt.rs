//! Debian packages without installing them: downloaded with apt, unpacked into a directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow, bail};

use crate::process;

/// The distribution's packages, as this machine's apt sources name them, downloaded below one directory.
#[derive(Debug)]
pub(crate) struct Apt {
    directory: PathBuf,
    /// Package lists of our own, for when the machine's are missing or too old and may not be refreshed.
    own_lists: bool,
}

impl Apt {
    /// Keeps downloads and, if needed, package lists in `directory`.
    ///
    /// # Errors
    /// When the machine has no apt and dpkg.
    pub(crate) fn new(directory: &Path) -> Result<Self> {
        for tool in ["apt-get", "apt-cache", "dpkg-deb"] {
            if process::find(tool).is_none() {
                bail!(
                    "{tool} not found: a guest is put together from Debian packages, so a host \
                     without an RDMA device has to be Debian or a derivative"
                );
            }
        }
        fs::create_dir_all(directory.join("lists/partial"))?;
        fs::create_dir_all(directory.join("archives/partial"))?;
        Ok(Self { directory: directory.to_owned(), own_lists: false })
    }

    /// The `.deb` files of `packages` and of what they need beyond what this machine has installed.
    pub(crate) fn download_missing(&mut self, packages: &[&str]) -> Result<Vec<PathBuf>> {
        self.with_fresh_lists(|apt| {
            apt.clear_archives()?;
            let mut command = apt.command("apt-get");
            command.args(["install", "--yes", "--download-only", "--no-install-recommends"]);
            process::output(command.args(packages))?;
            apt.archives()
        })
    }

    /// The `.deb` file of the package `package`, without what it needs.
    pub(crate) fn download(&mut self, package: &str) -> Result<PathBuf> {
        self.with_fresh_lists(|apt| {
            apt.clear_archives()?;
            let archives = apt.directory.join("archives");
            process::output(apt.command("apt-get").args(["download", package]).current_dir(archives))?;
            apt.archives()?.pop().ok_or_else(|| anyhow!("apt-get download {package} left no file"))
        })
    }

    /// What the metapackage `package` depends on whose name starts with `prefix`.
    pub(crate) fn dependency(&mut self, package: &str, prefix: &str) -> Result<String> {
        self.with_fresh_lists(|apt| {
            let output = process::output(apt.command("apt-cache").args(["depends", package]))?;
            dependency_in(&output, prefix)
                .ok_or_else(|| anyhow!("package {package} depends on nothing named {prefix}*"))
        })
    }

    /// Removes what was downloaded.
    pub(crate) fn clear_archives(&self) -> Result<()> {
        for archive in self.archives()? {
            fs::remove_file(archive)?;
        }
        Ok(())
    }

    /// Tries with the machine's package lists, then with fresh ones of our own, which need no root.
    fn with_fresh_lists<T>(&mut self, step: impl Fn(&Self) -> Result<T>) -> Result<T> {
        match step(self) {
            Err(first) if !self.own_lists => {
                self.own_lists = true;
                process::output(self.command("apt-get").arg("update"))
                    .with_context(|| format!("{first:#}; and fresh package lists cannot be had"))?;
                step(self)
            }
            result => result,
        }
    }

    fn command(&self, tool: &str) -> Command {
        let option = |name: &str, value: &Path| format!("{name}={}", value.display());
        let mut command = Command::new(tool);
        command.env("LC_ALL", "C.UTF-8").env("DEBIAN_FRONTEND", "noninteractive");
        command.args(["-qq", "-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User="]);
        command.args(["-o", &option("Dir::Cache::archives", &self.directory.join("archives"))]);
        if self.own_lists {
            command.args(["-o", &option("Dir::State::lists", &self.directory.join("lists"))]);
            command.args(["-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache="]);
        }
        command
    }

    fn archives(&self) -> Result<Vec<PathBuf>> {
        let mut archives = Vec::new();
        for entry in fs::read_dir(self.directory.join("archives"))? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "deb") {
                archives.push(path);
            }
        }
        archives.sort();
        Ok(archives)
    }
}

/// Unpacks `archive` into `root`, which gets the layout of a merged-/usr system: `/bin`, `/lib` and so on are links
/// into `/usr`. An overlay of it would otherwise hide those links of the system below.
pub(crate) fn unpack(archive: &Path, root: &Path) -> Result<()> {
    for name in ["bin", "sbin", "lib", "lib64"] {
        let link = root.join(name);
        if !link.is_symlink() {
            fs::create_dir_all(root.join("usr").join(name))?;
            std::os::unix::fs::symlink(Path::new("usr").join(name), link)?;
        }
    }
    let mut unpacking = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(archive)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run dpkg-deb")?;
    let tar = unpacking.stdout.take().context("dpkg-deb without output")?;
    let status = Command::new("tar")
        .args(["--extract", "--keep-directory-symlink", "--no-same-owner", "--directory"])
        .arg(root)
        .stdin(tar)
        .status();
    let unpacked = unpacking.wait()?.success();
    if !(unpacked && status.context("cannot run tar")?.success()) {
        bail!("cannot unpack {}", archive.display());
    }
    Ok(())
}

/// Installs `package` on this machine, for a program that cannot be used from a directory; root only.
pub(crate) fn install(package: &str) -> Result<()> {
    let install = || {
        process::output(Command::new("apt-get").env("DEBIAN_FRONTEND", "noninteractive").args([
            "install",
            "--yes",
            "--no-install-recommends",
            package,
        ]))
    };
    if install().is_err() {
        process::output(Command::new("apt-get").arg("update"))?;
        install()?;
    }
    Ok(())
}

fn dependency_in(depends: &str, prefix: &str) -> Option<String> {
    depends
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "))
        .find(|package| package.starts_with(prefix))
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_is_found_in_its_metapackage() {
        let depends = "linux-image-amd64\n  Depends: linux-image-6.1.0-56-amd64\n  Conflicts: x\n";
        assert_eq!(dependency_in(depends, "linux-image-").as_deref(), Some("linux-image-6.1.0-56-amd64"));
        assert_eq!(dependency_in("linux-image-amd64\n", "linux-image-"), None);
    }
}
