//! The guest's root: the host's file system, read-only, under the package layers and a writable scratch layer.

use std::ffi::CString;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, mount, mount_move};

use crate::softroce::config::{Config, tag};

/// Flag of `finit_module(2)`: the kernel decompresses the module.
const MODULE_INIT_COMPRESSED_FILE: i32 = 4;

/// Mounts the kernel's own file systems below `root`.
pub(super) fn mount_kernel_file_systems(root: &Path) -> Result<()> {
    mount_fs("devtmpfs", &root.join("dev"), "devtmpfs", "mode=755")?;
    mount_fs("proc", &root.join("proc"), "proc", "")?;
    mount_fs("sysfs", &root.join("sys"), "sysfs", "")
}

/// Loads all modules in `directory`, in the order of their names.
pub(super) fn load_modules(directory: &Path) -> Result<()> {
    let mut modules: Vec<_> = fs::read_dir(directory)?.collect::<Result<_, _>>()?;
    modules.sort_by_key(fs::DirEntry::file_name);
    for module in modules {
        let path = module.path();
        let compressed = path.extension().is_some_and(|extension| extension != "ko");
        let flags = if compressed { MODULE_INIT_COMPRESSED_FILE } else { 0 };
        rustix::system::finit_module(File::open(&path)?, c"", flags)
            .with_context(|| format!("cannot load {}", path.display()))?;
    }
    Ok(())
}

/// Mounts the root that `config` describes and enters it.
pub(super) fn enter(config: &Config) -> Result<()> {
    mount_share(tag::BASE, Path::new("/base"), true)?;
    mount_share(tag::OVERLAYS, Path::new("/overlays"), true)?;
    mount_fs("changes", Path::new("/changes"), "tmpfs", "mode=755,size=75%")?;
    fs::create_dir("/changes/upper")?;
    fs::create_dir("/changes/work")?;
    let overlays = config.overlays.iter().map(|name| format!("/overlays/{name}:"));
    let options =
        format!("lowerdir={}/base,upperdir=/changes/upper,workdir=/changes/work", overlays.collect::<String>());
    let root = Path::new("/root");
    mount_fs("root", root, "overlay", &options)?;

    mount_kernel_file_systems(root)?;
    fs::create_dir_all(root.join("dev/pts"))?;
    mount_fs("devpts", &root.join("dev/pts"), "devpts", "ptmxmode=666")?;
    fs::create_dir_all(root.join("dev/shm"))?;
    mount_fs("shm", &root.join("dev/shm"), "tmpfs", "mode=1777")?;
    mount_fs("run", &root.join("run"), "tmpfs", "mode=755")?;
    for (link, target) in [("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")] {
        symlink(format!("/proc/self/fd{target}"), root.join("dev").join(link))?;
    }

    let writable = root.join(config.writable.strip_prefix("/").unwrap_or(&config.writable));
    fs::create_dir_all(&writable)?;
    mount_share(tag::WRITABLE, &writable, false)?;

    // pivot_root(2) does not work on an initramfs, so the new root is moved over it, as switch_root(8) does.
    std::env::set_current_dir(root)?;
    mount_move(c".", c"/").context("cannot move the root")?;
    rustix::process::chroot(c".").context("cannot enter the root")?;
    std::env::set_current_dir("/")?;
    Ok(())
}

fn mount_share(tag: &str, target: &Path, read_only: bool) -> Result<()> {
    let access = if read_only { "ro," } else { "" };
    // cache=loose reads ahead and caches without revalidation. The guest may miss changes that the host makes to these
    // files while it runs.
    let options = format!("{access}trans=virtio,version=9p2000.L,msize=512000,cache=loose");
    mount_fs(tag, target, "9p", &options)
}

fn mount_fs(source: &str, target: &Path, kind: &str, options: &str) -> Result<()> {
    let flags = if options.starts_with("ro,") { MountFlags::RDONLY } else { MountFlags::empty() };
    let options = CString::new(options.trim_start_matches("ro,"))?;
    let path = CString::new(target.as_os_str().as_bytes())?;
    mount(source, path.as_c_str(), kind, flags, Some(options.as_c_str()))
        .with_context(|| format!("cannot mount {source} ({kind}) on {}", target.display()))
}
