//! The file system layers of a guest: kernel modules and an RDMA userland over this machine's own file system.
//!
//! Both layers are unpacked from distribution packages below the target directory. For a guest of another release, the
//! userland layer contains all dependencies, including the C library, and hides this machine's versions of them.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use rustix::fs::{FlockOperation, flock};

use super::release::{self, LINKER, Release};
use crate::apt::{self, Apt};
use crate::process;

/// Packages of the userland: RDMA libraries, tools to configure the device, and programs to compare with.
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

/// Version of the layer format. Increase it when the contents of a layer change.
const FORMAT: u32 = 1;

/// File in a layer that identifies its contents.
const STAMP: &str = ".stamp";

/// Kernel and file system layers of a guest.
#[derive(Debug)]
pub(crate) struct Layers {
    /// Root file system below the overlays.
    pub(crate) base: PathBuf,
    /// Directory that contains the [`Layers::OVERLAYS`].
    pub(crate) overlays: PathBuf,
    /// Kernel version, which is also the name of the module directory.
    pub(crate) version: String,
    /// Lock on the layers: shared while a guest uses them, exclusive while they are changed.
    _lock: File,
}

impl Layers {
    /// Subdirectories of `overlays`, topmost first.
    pub(crate) const OVERLAYS: [&str; 2] = ["kernel", "userland"];

    /// Prepares the layers below `directory`, and downloads missing packages.
    ///
    /// The packages come from `release`, or else from this machine's own sources. `refresh` downloads everything again.
    pub(crate) fn prepare(directory: &Path, release: Option<Release>, refresh: bool) -> Result<Self> {
        if std::env::consts::ARCH != "x86_64" {
            bail!("a SoftRoCE guest needs an x86-64 host, but this is {}", std::env::consts::ARCH);
        }
        let overlays = directory.join("layers");
        fs::create_dir_all(&overlays)?;
        let lock = File::create(directory.join("lock"))?;
        let mut exclusive = flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok();
        if !exclusive {
            // Another process prepares the layers, or runs a guest on them. A shared lock is enough, unless the layers must be
            // rebuilt.
            flock(&lock, FlockOperation::LockShared)?;
            if refresh || !Self::OVERLAYS.iter().all(|layer| is_usable(&overlays.join(layer))) {
                flock(&lock, FlockOperation::LockExclusive)?;
                exclusive = true;
            }
        }
        if exclusive {
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

    /// Path of the kernel image.
    pub(crate) fn image(&self) -> PathBuf {
        self.overlays.join("kernel/boot").join(format!("vmlinuz-{}", self.version))
    }

    /// Directory of the kernel's modules.
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
                "a guest is built from Debian packages, so a host without an RDMA device has to run Debian or a \
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

/// First line of a layer's stamp.
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
    // The package contains no modules.dep; its installation would run depmod.
    process::output(depmod(&overlays.join("userland"))?.arg("--basedir").arg(&unpacked).arg(&version))?;
    fs::write(unpacked.join(STAMP), format_line())?;
    remove(&layer)?;
    fs::rename(unpacked, layer)?;
    apt.get()?.clear_archives()
}

/// A depmod command: the one in `userland` with its libraries, or else this machine's.
fn depmod(userland: &Path) -> Result<Command> {
    let (kmod, libraries) = (userland.join("usr/bin/kmod"), userland.join("usr/lib/x86_64-linux-gnu"));
    let linker = userland.join(LINKER);
    let mut command = if linker.exists() {
        // A C library needs the dynamic linker of the same release.
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
        // The packages to download depend on the installed packages.
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

/// Version of the kernel in `layer`.
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
