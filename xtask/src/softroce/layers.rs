//! The file system of a guest: this machine's own, with a kernel's modules and an RDMA userland laid over it.
//!
//! Both come from distribution packages and stay below the target directory. For a guest of another release the userland
//! brings all that it needs, down to the C library, so that what this machine has of it is hidden below.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use rustix::fs::{FlockOperation, flock};

use super::release::{self, LINKER, Release};
use crate::apt::{self, Apt};
use crate::process;

/// What programs over RDMA need at run time, and the tools to set the device up and to compare with.
const USERLAND: &[&str] = &[
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "kmod",
    "libibverbs1",
    "librdmacm1",
    "perftest",
    "rdmacm-utils",
];

/// Changes when what is unpacked, or how, changes.
const FORMAT: u32 = 1;

/// The file in a layer that tells what the layer was made of.
const STAMP: &str = ".stamp";

/// What a guest boots and sees.
#[derive(Debug)]
pub(crate) struct Layers {
    /// The root file system below everything.
    pub(crate) base: PathBuf,
    /// The directory whose [`Layers::OVERLAYS`] are laid over the base.
    pub(crate) overlays: PathBuf,
    /// The kernel's version, the name of its module directory.
    pub(crate) version: String,
    /// Shared by everybody whose guest uses the layers, exclusive for who changes them.
    _lock: File,
}

impl Layers {
    /// Directories of `overlays`, the topmost first.
    pub(crate) const OVERLAYS: [&str; 2] = ["kernel", "userland"];

    /// Prepares the layers of `release`, or else of this machine's own packages, below `directory`, downloading what is
    /// missing. `refresh` downloads all of it again.
    pub(crate) fn prepare(directory: &Path, release: Option<Release>, refresh: bool) -> Result<Self> {
        if std::env::consts::ARCH != "x86_64" {
            bail!("a SoftRoCE guest can be booted on x86-64 only, this is {}", std::env::consts::ARCH);
        }
        let overlays = directory.join("layers");
        fs::create_dir_all(&overlays)?;
        let lock = File::create(directory.join("lock"))?;
        let mut alone = flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok();
        if !alone {
            // Somebody prepares the layers, or has a guest on them. As they then are they will do, unless a new format
            // of them is needed.
            flock(&lock, FlockOperation::LockShared)?;
            if refresh || !Self::OVERLAYS.iter().all(|layer| is_usable(&overlays.join(layer))) {
                flock(&lock, FlockOperation::LockExclusive)?;
                alone = true;
            }
        }
        if alone {
            let mut apt = LazyApt { directory: directory.join("apt"), release, apt: None };
            if refresh {
                for layer in Self::OVERLAYS {
                    remove(&overlays.join(layer))?;
                }
            }
            userland(&overlays, &mut apt).context("cannot prepare the guest's RDMA userland")?;
            if release.is_some() {
                release::check_linker(&overlays.join("userland"))?;
            }
            kernel(&overlays, &mut apt).context("cannot prepare the guest's kernel")?;
            flock(&lock, FlockOperation::LockShared)?;
        }
        let version = version(&overlays.join("kernel"))?;
        Ok(Self { base: PathBuf::from("/"), overlays, version, _lock: lock })
    }

    /// The kernel image.
    pub(crate) fn image(&self) -> PathBuf {
        self.overlays.join("kernel/boot").join(format!("vmlinuz-{}", self.version))
    }

    /// The directory of the kernel's modules.
    pub(crate) fn modules(&self) -> PathBuf {
        self.overlays.join("kernel/usr/lib/modules").join(&self.version)
    }
}

struct LazyApt {
    directory: PathBuf,
    release: Option<Release>,
    apt: Option<Apt>,
}

impl LazyApt {
    fn get(&mut self) -> Result<&mut Apt> {
        if self.apt.is_none() {
            let mut apt = Apt::new(&self.directory).context(
                "a guest is put together from Debian packages, so a host without an RDMA device has to be Debian or a \
                 derivative",
            )?;
            if let Some(release) = self.release {
                eprintln!("softroce: reading the package list of {}", release.codename());
                apt.use_suite(release.codename())?;
            }
            self.apt = Some(apt);
        }
        self.apt.as_mut().context("apt was just set")
    }
}

/// The first line of the stamp of a layer.
fn format_line() -> String {
    format!("format {FORMAT}\n")
}

fn is_usable(layer: &Path) -> bool {
    fs::read_to_string(layer.join(STAMP)).is_ok_and(|stamp| stamp.starts_with(&format_line()))
}

fn kernel(overlays: &Path, apt: &mut LazyApt) -> Result<()> {
    let layer = overlays.join("kernel");
    if is_usable(&layer) {
        return Ok(());
    }
    let package = apt.get()?.dependency("linux-image-amd64", "linux-image-")?;
    eprintln!("softroce: downloading {package} into {}", overlays.display());
    let archives = apt.get()?.download(&[&package])?;
    let unpacked = overlays.join("kernel.new");
    remove(&unpacked)?;
    for archive in archives {
        apt::unpack(&archive, &unpacked)?;
    }
    let version = version(&unpacked)?;
    // The package runs depmod when it is installed; its modules.dep does not come with it.
    process::output(depmod(&overlays.join("userland"))?.arg("--basedir").arg(&unpacked).arg(&version))?;
    fs::write(unpacked.join(STAMP), format_line())?;
    remove(&layer)?;
    fs::rename(unpacked, layer)?;
    apt.get()?.clear_archives()
}

/// depmod of `userland`, with the libraries that it has there, or this machine's.
fn depmod(userland: &Path) -> Result<Command> {
    let (kmod, libraries) = (userland.join("usr/bin/kmod"), userland.join("usr/lib/x86_64-linux-gnu"));
    let linker = userland.join(LINKER);
    let mut command = if linker.exists() {
        // A C library goes with the dynamic linker of its own release.
        let mut command = Command::new(linker);
        command.arg("--library-path").arg(libraries).args(["--argv0", "depmod"]).arg(kmod);
        command
    } else {
        let kmod = if kmod.exists() { kmod } else { process::find("kmod").context("no kmod")? };
        let mut command = Command::new(kmod);
        command.env("LD_LIBRARY_PATH", libraries).arg0("depmod");
        command
    };
    command.env("LC_ALL", "C.UTF-8");
    Ok(command)
}

fn userland(overlays: &Path, apt: &mut LazyApt) -> Result<()> {
    let layer = overlays.join("userland");
    let mut stamp = format!("{}packages {USERLAND:?}\n", format_line());
    if apt.release.is_none() {
        // What has to be downloaded depends on what is installed.
        let installed = fs::metadata("/var/lib/dpkg/status").and_then(|status| status.modified());
        stamp.push_str(&format!("installed {installed:?}\n"));
    }
    if fs::read_to_string(layer.join(STAMP)).is_ok_and(|found| found == stamp) {
        return Ok(());
    }
    eprintln!("softroce: downloading the RDMA userland into {}", overlays.display());
    let unpacked = overlays.join("userland.new");
    remove(&unpacked)?;
    fs::create_dir_all(&unpacked)?;
    for archive in apt.get()?.download_missing(USERLAND)? {
        apt::unpack(&archive, &unpacked)?;
    }
    fs::write(unpacked.join(STAMP), stamp)?;
    remove(&layer)?;
    fs::rename(unpacked, layer)?;
    apt.get()?.clear_archives()
}

/// The version of the one kernel in `layer`.
fn version(layer: &Path) -> Result<String> {
    for entry in fs::read_dir(layer.join("boot"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if let Some(version) = name.strip_prefix("vmlinuz-") {
            return Ok(version.to_owned());
        }
    }
    Err(anyhow!("no kernel image in {}", layer.display()))
}

fn remove(directory: &Path) -> Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", directory.display()))
        }
        _ => Ok(()),
    }
}
