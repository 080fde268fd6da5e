//! Debian packages: downloads them with apt and unpacks them into a directory, or installs them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow, bail};

use crate::{process, workspace};

/// Keyring that verifies Debian's repositories, independent of the keys that this machine's apt trusts.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Downloads packages below one directory, by default from this machine's apt sources.
#[derive(Debug)]
pub(crate) struct Apt {
    directory: PathBuf,
    /// Whether to use package lists in `directory`. The machine's lists may be missing, outdated or read-only.
    own_lists: bool,
    /// Further options that override the machine's configuration.
    options: Vec<String>,
}

impl Apt {
    /// Keeps downloads and, if needed, package lists in `directory`.
    ///
    /// # Errors
    /// If apt or dpkg is missing.
    pub(crate) fn new(directory: &Path) -> Result<Self> {
        for tool in ["apt-get", "apt-cache", "dpkg-deb"] {
            if process::find(tool).is_none() {
                bail!("{tool} not found: this machine is neither Debian nor a derivative");
            }
        }
        fs::create_dir_all(directory.join("lists/partial"))?;
        fs::create_dir_all(directory.join("archives/partial"))?;
        Ok(Self { directory: directory.to_owned(), own_lists: false, options: Vec::new() })
    }

    /// Restricts downloads to `suite` of `repository`, as if no package were installed, and fetches its package lists.
    pub(crate) fn use_only(&mut self, repository: &str, suite: &str) -> Result<()> {
        let (sources, status) = (self.directory.join("sources.list"), self.directory.join("status"));
        let signed = if Path::new(KEYRING).is_file() { format!("[signed-by={KEYRING}] ") } else { String::new() };
        fs::write(&sources, format!("deb {signed}{repository} {suite} main\n"))?;
        // An empty status file hides the packages that are installed on this machine.
        fs::write(&status, "")?;
        self.own_lists = true;
        self.options = vec![
            option("Dir::Etc::sourcelist", &sources),
            option("Dir::Etc::sourceparts", Path::new("/dev/null")),
            option("Dir::State::status", &status),
            "Acquire::http::Timeout=30".to_owned(),
            "Acquire::Languages=none".to_owned(),
            // Without this option, apt only warns about a failed download.
            "APT::Update::Error-Mode=any".to_owned(),
        ];
        process::output(self.command("apt-get").arg("update"))?;
        Ok(())
    }

    /// Restricts downloads to `suite`, from the first of this machine's repositories that has it.
    pub(crate) fn use_suite(&mut self, suite: &str) -> Result<()> {
        let mut used = Err(anyhow!("apt has no sources"));
        for repository in repositories()? {
            used = self.use_only(&repository, suite);
            if used.is_ok() {
                break;
            }
        }
        used.with_context(|| format!("none of this machine's repositories has Debian's {suite}"))
    }

    /// Downloads `packages` and all their dependencies that are not installed. Returns the `.deb` files.
    ///
    /// After [`Apt::use_only`], no dependency counts as installed.
    pub(crate) fn download_missing(&mut self, packages: &[&str]) -> Result<Vec<PathBuf>> {
        self.with_fresh_lists(|apt| {
            apt.clear_archives()?;
            let mut command = apt.command("apt-get");
            command.args(["install", "--yes", "--download-only", "--no-install-recommends"]);
            process::output(command.args(packages))?;
            apt.archives()
        })
    }

    /// Downloads `packages` without their dependencies and returns the `.deb` files.
    pub(crate) fn download(&mut self, packages: &[&str]) -> Result<Vec<PathBuf>> {
        self.with_fresh_lists(|apt| {
            apt.clear_archives()?;
            let archives = apt.directory.join("archives");
            process::output(apt.command("apt-get").arg("download").args(packages).current_dir(archives))?;
            let archives = apt.archives()?;
            if archives.len() != packages.len() {
                bail!("apt-get download {} left {} files", packages.join(" "), archives.len());
            }
            Ok(archives)
        })
    }

    /// The dependency of the metapackage `package` whose name starts with `prefix`.
    pub(crate) fn dependency(&mut self, package: &str, prefix: &str) -> Result<String> {
        self.with_fresh_lists(|apt| {
            let output = process::output(apt.command("apt-cache").args(["depends", package]))?;
            dependency_in(&output, prefix).ok_or_else(|| anyhow!("package {package} has no dependency named {prefix}*"))
        })
    }

    /// Removes the downloaded packages.
    pub(crate) fn clear_archives(&self) -> Result<()> {
        for archive in self.archives()? {
            fs::remove_file(archive)?;
        }
        Ok(())
    }

    /// Runs `step` with the machine's package lists, and retries it with fresh lists in `directory`, which need no root.
    fn with_fresh_lists<T>(&mut self, step: impl Fn(&Self) -> Result<T>) -> Result<T> {
        match step(self) {
            Err(first) if !self.own_lists => {
                self.own_lists = true;
                process::output(self.command("apt-get").arg("update"))
                    .with_context(|| format!("{first:#}; and fetching fresh package lists failed"))?;
                step(self)
            }
            result => result,
        }
    }

    fn command(&self, tool: &str) -> Command {
        let mut command = Command::new(tool);
        command.env("LC_ALL", "C.UTF-8").env("DEBIAN_FRONTEND", "noninteractive");
        command.args(["-qq", "-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User="]);
        command.args(["-o", &option("Dir::Cache::archives", &self.directory.join("archives"))]);
        if self.own_lists {
            command.args(["-o", &option("Dir::State::lists", &self.directory.join("lists"))]);
            command.args(["-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache="]);
        }
        command.args(self.options.iter().flat_map(|option| ["-o", option]));
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

fn option(name: &str, value: &Path) -> String {
    format!("{name}={}", value.display())
}

/// Unpacks `archive` into `root`, with the layout of a merged-/usr system: `/bin`, `/lib` and so on are links into `/usr`.
///
/// Without these links, an overlay of `root` would hide the links of the system below.
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

/// Installs `package` on this machine unless `present` returns true.
///
/// This is for packages that do not work from a directory.
///
/// # Errors
/// If this process may not install packages. The error then contains the command that does.
pub(crate) fn install_unless(present: impl Fn() -> bool, package: &str) -> Result<()> {
    if present() {
        return Ok(());
    }
    let _lock = workspace::lock()?;
    if present() {
        return Ok(());
    }
    if !process::is_root() || process::find("apt-get").is_none() {
        bail!("on Debian, install it with `sudo apt-get install --no-install-recommends {package}`");
    }
    eprintln!("installing {package} with apt-get");
    let install = || {
        let mut command = Command::new("apt-get");
        command.env("LC_ALL", "C.UTF-8").env("DEBIAN_FRONTEND", "noninteractive");
        process::output(command.args(["install", "--yes", "--no-install-recommends", package]))
    };
    if install().is_err() {
        // The package lists may be missing or outdated.
        process::output(Command::new("apt-get").arg("update"))?;
        install()?;
    }
    if !present() {
        bail!("the package {package} is installed but does not provide it");
    }
    Ok(())
}

/// The repositories that this machine installs from. Repositories with its own suite come first.
///
/// Repositories of security updates are left out, because they have no complete suites. apt itself reads its sources
/// here, so every format of sources file works.
pub(crate) fn repositories() -> Result<Vec<String>> {
    let listing = process::output(Command::new("apt-get").args(["update", "--print-uris"]))?;
    Ok(repositories_in(&listing, &codename()))
}

/// Codename of this machine's distribution release. Empty if unknown.
pub(crate) fn codename() -> String {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let codename = release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    codename.unwrap_or_default().trim_matches('"').to_owned()
}

/// The repositories in the output of `apt-get update --print-uris`, those with the suite `own` first.
fn repositories_in(listing: &str, own: &str) -> Vec<String> {
    let (mut first, mut others) = (Vec::new(), Vec::new());
    let mut seen = BTreeSet::new();
    for line in listing.lines() {
        let uri = line.trim_start_matches('\'').split('\'').next().unwrap_or_default();
        let Some((repository, path)) = uri.split_once("/dists/") else {
            continue;
        };
        if repository.ends_with("-security") || !seen.insert(repository) {
            continue;
        }
        let own = path.split('/').next() == Some(own);
        if own { &mut first } else { &mut others }.push(repository.to_owned());
    }
    first.extend(others);
    first
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
    fn the_kernel_package_is_found_in_its_metapackage() {
        let depends = "linux-image-amd64\n  Depends: linux-image-6.1.0-56-amd64\n  Conflicts: x\n";
        assert_eq!(dependency_in(depends, "linux-image-").as_deref(), Some("linux-image-6.1.0-56-amd64"));
        assert_eq!(dependency_in("linux-image-amd64\n", "linux-image-"), None);
    }

    #[test]
    fn the_repository_of_the_machines_suite_is_listed_first_and_once() {
        let listing = "\
'http://a.example/extra/dists/stable/InRelease' a_InRelease 0
'http://deb.debian.org/debian/dists/bookworm/InRelease' b_InRelease 0
'http://deb.debian.org/debian/dists/bookworm-updates/InRelease' c_InRelease 0
'http://deb.debian.org/debian-security/dists/bookworm-security/InRelease' d_InRelease 0
";
        let expected = ["http://deb.debian.org/debian", "http://a.example/extra"];
        assert_eq!(repositories_in(listing, "bookworm"), expected);
    }
}
