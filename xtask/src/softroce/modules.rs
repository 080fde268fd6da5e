//! Kernel modules that the guest loads before it mounts its root, in load order.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Modules for the serial port to the host and for the root file system.
const EARLY: &[&str] = &["virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay"];

/// Files of the early modules below `directory`, dependencies first.
pub(crate) fn early(directory: &Path) -> Result<Vec<PathBuf>> {
    let read = |name: &str| {
        let path = directory.join(name);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let files = resolve(EARLY, &read("modules.dep")?, &read("modules.builtin")?)?;
    Ok(files.iter().map(|file| directory.join(file)).collect())
}

fn resolve(wanted: &[&str], dependencies: &str, builtin: &str) -> Result<Vec<String>> {
    let builtin: BTreeSet<String> = builtin.lines().map(name).collect();
    let mut files: Vec<String> = Vec::new();
    for module in wanted {
        let line = dependencies.lines().filter_map(|line| line.split_once(':'));
        let Some((file, needs)) = line.into_iter().find(|(file, _)| name(file) == *module) else {
            if builtin.contains(*module) {
                continue;
            }
            bail!("the kernel has no module {module}");
        };
        // modules.dep lists direct and indirect dependencies. Loading them from right to left works.
        for file in needs.split_whitespace().rev().chain([file]) {
            if !files.iter().any(|listed| listed == file) {
                files.push(file.to_owned());
            }
        }
    }
    Ok(files)
}

/// Module name of a file: `9pnet_virtio` for `kernel/net/9p/9pnet_virtio.ko.xz`.
fn name(file: &str) -> String {
    let file = file.rsplit('/').next().unwrap_or(file);
    file.split(".ko").next().unwrap_or(file).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEPENDENCIES: &str = "\
kernel/drivers/virtio/virtio.ko:
kernel/drivers/virtio/virtio_ring.ko: kernel/drivers/virtio/virtio.ko
kernel/drivers/virtio/virtio_pci.ko.xz: kernel/drivers/virtio/virtio_ring.ko kernel/drivers/virtio/virtio.ko
kernel/net/9p/9pnet-virtio.ko: kernel/drivers/virtio/virtio_ring.ko kernel/drivers/virtio/virtio.ko
";

    #[test]
    fn dependencies_are_listed_first_and_once() {
        let files = resolve(&["virtio_pci", "9pnet_virtio"], DEPENDENCIES, "").unwrap();
        let names: Vec<_> = files.iter().map(|file| name(file)).collect();
        assert_eq!(names, ["virtio", "virtio_ring", "virtio_pci", "9pnet_virtio"]);
    }

    #[test]
    fn a_built_in_module_needs_no_file_and_a_missing_module_is_an_error() {
        assert!(resolve(&["overlay"], "", "kernel/fs/overlayfs/overlay.ko\n").unwrap().is_empty());
        let error = resolve(&["overlay"], DEPENDENCIES, "").unwrap_err();
        assert!(error.to_string().contains("overlay"), "{error}");
    }
}
