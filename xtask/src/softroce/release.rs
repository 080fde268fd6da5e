//! Releases of Debian whose kernel and RDMA userland a guest can have.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{apt, process};

/// The dynamic linker, which also tells its version, in a root file system.
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

    /// What Debian calls it.
    pub(crate) fn codename(self) -> &'static str {
        match self {
            Release::Bookworm => "bookworm",
            Release::Trixie => "trixie",
        }
    }

    /// The one that this machine runs.
    pub(crate) fn of_this_machine() -> Option<Self> {
        Self::named(&apt::codename())
    }

    fn named(codename: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|release| release.codename() == codename)
    }

    /// Those that are newer than what this machine runs, and so can run what is built here. None where this machine runs
    /// another distribution.
    pub(crate) fn newer() -> Vec<Self> {
        let own = Self::of_this_machine();
        Self::ALL.into_iter().filter(|release| own.is_some_and(|own| *release > own)).collect()
    }
}

/// Refuses a root file system whose C library is older than this machine's, with which programs built here do not start.
pub(crate) fn check_linker(root: &Path) -> Result<()> {
    let (theirs, ours) = (glibc(&root.join(LINKER))?, glibc(&Path::new("/").join(LINKER))?);
    if theirs < ours {
        bail!(
            "its glibc is {}.{}, this machine's is {}.{}: programs that are built here would not start",
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
    glibc_in(&text).with_context(|| format!("{} tells no version: {text}", linker.display()))
}

/// The version in what the dynamic linker says of itself.
fn glibc_in(text: &str) -> Option<(u32, u32)> {
    let version = text.lines().next()?.split("version ").nth(1)?;
    let (major, rest) = version.split_once('.')?;
    let minor: String = rest.chars().take_while(char::is_ascii_digit).collect();
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dynamic_linker_tells_its_version() {
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
