//! The guest's root: the host's file system, read-only, with the layers of packages and a scratch layer above.

use std::ffi::CString;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, mount, mount_move};

use crate::softroce::config::{Config, tag};

/// The kernel is to decompress the module, says `linux/module.h`.
const MODULE_INIT_COMPRESSED_FILE: i32 = 4;

/// Mounts what the kernel itself provides below `root`.
pub(super) fn mount_kernel_file_systems(root: &Path) -> Result<()> {
    attach("devtmpfs", &root.join("dev"), "devtmpfs", "mode=755")?;
    attach("proc", &root.join("proc"), "proc", "")?;
    attach("sysfs", &root.join("sys"), "sysfs", "")
}

/// Loads every module of `directory`, in the order of their names.
pub(super) fn load_modules(directory: &Path) -> Result<()> {
    let mut modules: Vec<_> = fs::read_dir(directory)?.collect::<Result<_, _>>()?;
    modules.sort_by_key(fs::DirEntry::file_name);
    for module in modules {
        let path = module.path();
        let compressed = path.extension().is_some_and(|ending| ending != "ko");
        let flags = if compressed { MODULE_INIT_COMPRESSED_FILE } else { 0 };
        rustix::system::finit_module(File::open(&path)?, c"", flags)
            .with_context(|| format!("cannot load {}", path.display()))?;
    }
    Ok(())
}

/// Assembles the root of `config` and makes it this process's.
pub(super) fn enter(config: &Config) -> Result<()> {
    share(tag::BASE, Path::new("/base"), true)?;
    share(tag::OVERLAYS, Path::new("/overlays"), true)?;
    attach("changes", Path::new("/changes"), "tmpfs", "mode=755,size=75%")?;
    fs::create_dir("/changes/upper")?;
    fs::create_dir("/changes/work")?;
    let overlays = config.overlays.iter().map(|name| format!("/overlays/{name}:"));
    let options =
        format!("lowerdir={}/base,upperdir=/changes/upper,workdir=/changes/work", overlays.collect::<String>());
    let root = Path::new("/root");
    attach("root", root, "overlay", &options)?;

    mount_kernel_file_systems(root)?;
    fs::create_dir_all(root.join("dev/pts"))?;
    attach("devpts", &root.join("dev/pts"), "devpts", "ptmxmode=666")?;
    fs::create_dir_all(root.join("dev/shm"))?;
    attach("shm", &root.join("dev/shm"), "tmpfs", "mode=1777")?;
    attach("run", &root.join("run"), "tmpfs", "mode=755")?;
    for (link, target) in [("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")] {
        symlink(format!("/proc/self/fd{target}"), root.join("dev").join(link))?;
    }

    let writable = root.join(config.writable.strip_prefix("/").unwrap_or(&config.writable));
    fs::create_dir_all(&writable)?;
    share(tag::WRITABLE, &writable, false)?;

    // An initramfs cannot be pivoted away from: it is moved over and left behind, as switch_root does.
    std::env::set_current_dir(root)?;
    mount_move(c".", c"/").context("cannot move the root")?;
    rustix::process::chroot(c".").context("cannot enter the root")?;
    std::env::set_current_dir("/")?;
    Ok(())
}

fn share(tag: &str, target: &Path, read_only: bool) -> Result<()> {
    let access = if read_only { "ro," } else { "" };
    // cache=loose reads ahead and keeps what was read; nobody else changes these files while the guest runs, or
    // accepts that it does not notice.
    let options = format!("{access}trans=virtio,version=9p2000.L,msize=512000,cache=loose");
    attach(tag, target, "9p", &options)
}

fn attach(source: &str, target: &Path, kind: &str, options: &str) -> Result<()> {
    let flags = if options.starts_with("ro,") { MountFlags::RDONLY } else { MountFlags::empty() };
    let options = CString::new(options.trim_start_matches("ro,"))?;
    let path = CString::new(target.as_os_str().as_bytes())?;
    mount(source, path.as_c_str(), kind, flags, Some(options.as_c_str()))
        .with_context(|| format!("cannot mount {source} ({kind}) on {}", target.display()))
}
