//! Debian releases that a guest's kernel and RDMA userland can come from.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{apt, process};

/// Path of the dynamic linker in a root file system. `--version` prints its glibc version.
pub(crate) const LINKER: &str = "usr/lib64/ld-linux-x86-64.so.2";

/// A release of Debian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(crate) enum Release {
    /// Debian 12: kernel 6.1, rdma-core 44, perftest 4.5
    Bookworm,
    /// Debian 13: kernel 6.12, rdma-core 56, perftest 25.01
    Trixie,
}

impl Release {
    const ALL: [Release; 2] = [Release::Bookworm, Release::Trixie];

    /// Debian's codename.
    pub(crate) fn codename(self) -> &'static str {
        match self {
            Release::Bookworm => "bookworm",
            Release::Trixie => "trixie",
        }
    }

    /// The release that this machine runs.
    pub(crate) fn of_this_machine() -> Option<Self> {
        Self::named(&apt::codename())
    }

    fn named(codename: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|release| release.codename() == codename)
    }

    /// Releases newer than this machine's, which can run programs that are built here.
    ///
    /// Empty if this machine runs another distribution.
    pub(crate) fn newer() -> Vec<Self> {
        let own = Self::of_this_machine();
        Self::ALL.into_iter().filter(|release| own.is_some_and(|own| *release > own)).collect()
    }
}

/// Checks that the C library in `root` is at least as new as this machine's.
///
/// With an older one, programs that are built here do not start.
pub(crate) fn check_linker(root: &Path) -> Result<()> {
    let (theirs, ours) = (glibc(&root.join(LINKER))?, glibc(&Path::new("/").join(LINKER))?);
    if theirs < ours {
        bail!(
            "its glibc is {}.{} and this machine's is {}.{}: programs that are built here would not start",
            theirs.0,
            theirs.1,
            ours.0,
            ours.1
        );
    }
    Ok(())
}

fn glibc(linker: &Path) -> Result<(u32, u32)> {
    let text = process::output(Command::new(linker).arg("--version"))?;
    glibc_in(&text).with_context(|| format!("{} prints no version: {text}", linker.display()))
}

/// Version in the output of the dynamic linker.
fn glibc_in(text: &str) -> Option<(u32, u32)> {
    let version = text.lines().next()?.split("version ").nth(1)?;
    let (major, minor) = version.split_once('.')?;
    let minor: String = minor.chars().take_while(char::is_ascii_digit).collect();
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_the_dynamic_linker_is_parsed() {
        let text = "ld.so (Debian GLIBC 2.41-12+deb13u1) stable release version 2.41.\nCopyright\n";
        assert_eq!(glibc_in(text), Some((2, 41)));
        assert_eq!(glibc_in("musl libc (x86_64)\nVersion 1.2.5\n"), None);
    }

    #[test]
    fn a_release_is_found_by_its_codename() {
        assert_eq!(Release::named("trixie"), Some(Release::Trixie));
        assert_eq!(Release::named("noble"), None);
        assert!(Release::Bookworm < Release::Trixie);
    }
}
