//! The C headers that rdma-sys binds, and the libclang that binds them, on machines that have neither.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};

use crate::apt::{self, Apt};
use crate::process;

/// The release that `rdma-sys/src/bindings.rs` comes from, as `xtask/bindgen` records it, and the Debian suite that
/// has it.
const RDMA_CORE: &str = "56.1";
const SUITE: &str = "trixie";
const PACKAGES: [&str; 2] = ["libibverbs-dev", "librdmacm-dev"];

/// The include folder of rdma-core 56.1: that of `RDMA_CORE_INCLUDE`, of an installed package, or of Debian packages
/// that are unpacked below `target_dir` and not installed.
pub(crate) fn headers(target_dir: &Path) -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("RDMA_CORE_INCLUDE") {
        let dir = PathBuf::from(dir);
        check(&dir).with_context(|| format!("RDMA_CORE_INCLUDE={}", dir.display()))?;
        return Ok(dir);
    }
    let installed = Path::new("/usr/include");
    if version(installed).as_deref() == Some(RDMA_CORE) && check(installed).is_ok() {
        return Ok(installed.to_owned());
    }
    let kept = target_dir.join("rdma-core-headers").join(RDMA_CORE);
    let include = kept.join("usr/include");
    if check(&include).is_err() {
        download(&kept).with_context(|| {
            format!(
                "no headers of rdma-core {RDMA_CORE} (unpack {} of that release and set RDMA_CORE_INCLUDE to the \
                 folder that holds infiniband/ and rdma/)",
                PACKAGES.join(" and ")
            )
        })?;
        check(&include)?;
    }
    Ok(include)
}

/// Refuses a folder that lacks the headers, or that says it has those of another release.
fn check(include: &Path) -> Result<()> {
    for header in ["infiniband/verbs.h", "rdma/rdma_cma.h", "rdma/rdma_verbs.h"] {
        if !include.join(header).is_file() {
            bail!("{} is missing", include.join(header).display());
        }
    }
    match version(include) {
        Some(version) if version != RDMA_CORE => {
            bail!("these are headers of rdma-core {version}, the bindings are of {RDMA_CORE}")
        }
        // Headers do not tell their release. Without a pkg-config file beside them, take the user's word.
        _ => Ok(()),
    }
}

/// The release that the pkg-config file beside an include folder names: `Version: 1.14.56.1` is 56.1.
fn version(include: &Path) -> Option<String> {
    let prefix = include.parent()?;
    let mut folders = vec![prefix.join("lib64"), prefix.join("lib")];
    folders.extend(entries(&prefix.join("lib")));
    let text = folders.iter().find_map(|dir| fs::read_to_string(dir.join("pkgconfig/libibverbs.pc")).ok())?;
    let version = text.lines().find_map(|line| line.strip_prefix("Version:"))?.trim();
    version.splitn(3, '.').nth(2).map(str::to_owned)
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

/// Fetches the packages from a repository that this machine installs from and unpacks them into `kept`.
fn download(kept: &Path) -> Result<()> {
    // Another process may be at it: each works in a folder of its own, and one rename decides.
    let work = kept.with_extension(format!("{}.tmp", std::process::id()));
    let result = download_in(&work, kept);
    _ = fs::remove_dir_all(&work);
    result
}

fn download_in(work: &Path, kept: &Path) -> Result<()> {
    let mut apt = Apt::new(work)?;
    let mut fetched = Err(anyhow!("apt has no sources"));
    for repository in apt::repositories()? {
        fetched = fetch(&mut apt, &repository);
        if fetched.is_ok() {
            break;
        }
    }
    let root = work.join("root");
    for deb in fetched? {
        apt::unpack(&deb, &root)?;
    }
    check(&root.join("usr/include"))?;
    // What is there fails the check, or nobody would be here.
    _ = fs::remove_dir_all(kept);
    match fs::rename(&root, kept) {
        Err(error) if check(&kept.join("usr/include")).is_err() => Err(error).context("keeping the headers"),
        _ => Ok(()),
    }
}

/// The packages of `repository`, if they are of the right release.
fn fetch(apt: &mut Apt, repository: &str) -> Result<Vec<PathBuf>> {
    eprintln!("rdma-core {RDMA_CORE} headers: reading the package list of {SUITE}");
    apt.use_only(repository, SUITE)?;
    eprintln!("rdma-core {RDMA_CORE} headers: downloading {}", PACKAGES.join(" and "));
    let debs = apt.download(&PACKAGES)?;
    for deb in &debs {
        let shown =
            process::output(Command::new("dpkg-deb").args(["--show", "--showformat=${Package} ${Version}"]).arg(deb))?;
        let (package, version) = shown.split_once(' ').unwrap_or_default();
        if version.split('-').next() != Some(RDMA_CORE) {
            bail!("{SUITE} has {package} {version}, not {RDMA_CORE}");
        }
    }
    Ok(debs)
}

/// Whether bindgen will find libclang and the headers that belong to it.
fn libclang_present() -> bool {
    if let Some(path) = std::env::var_os("LIBCLANG_PATH") {
        let path = PathBuf::from(path);
        return path.is_file() || entries(&path).iter().any(|path| is_libclang(path));
    }
    // /usr/lib64 on Fedora, /usr/lib/<triplet> and /usr/lib/llvm-<version>/lib on Debian.
    let mut folders: Vec<PathBuf> = ["/usr/lib", "/usr/lib64", "/usr/local/lib"].map(PathBuf::from).into();
    for _ in 0..2 {
        let below: Vec<PathBuf> = folders.iter().flat_map(|dir| entries(dir)).filter(|path| path.is_dir()).collect();
        folders.extend(below);
        folders.sort_unstable();
        folders.dedup();
    }
    let library = folders.iter().any(|dir| entries(dir).iter().any(|path| is_libclang(path)));
    let own_headers = folders.iter().any(|dir| {
        let versions = if dir.ends_with("clang") { entries(dir) } else { entries(&dir.join("clang")) };
        versions.iter().any(|version| version.join("include/stddef.h").is_file())
    });
    library && own_headers
}

fn is_libclang(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with("libclang.so")
        || (name.strip_prefix("libclang-"))
            .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()) && rest.contains(".so"))
}

/// Makes sure that bindgen finds libclang: installs it where this program may.
pub(crate) fn libclang() -> Result<()> {
    apt::install_unless(libclang_present, "libclang-dev")
        .context("bindgen needs libclang (LIBCLANG_PATH tells where it is, if elsewhere than usual)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_another_release_is_refused() {
        let dir = std::env::temp_dir().join(format!("headers-{}", std::process::id()));
        let include = dir.join("include");
        for header in ["infiniband/verbs.h", "rdma/rdma_cma.h", "rdma/rdma_verbs.h"] {
            let path = include.join(header);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        assert!(check(&include).is_ok(), "no pkg-config file: trusted");

        let pkgconfig = dir.join("lib/x86_64-linux-gnu/pkgconfig");
        fs::create_dir_all(&pkgconfig).unwrap();
        fs::write(pkgconfig.join("libibverbs.pc"), "Name: libibverbs\nVersion: 1.14.44.0\n").unwrap();
        assert!(check(&include).unwrap_err().to_string().contains("44.0"));

        fs::write(pkgconfig.join("libibverbs.pc"), format!("Version: 1.14.{RDMA_CORE}\n")).unwrap();
        assert!(check(&include).is_ok());

        fs::remove_file(include.join("rdma/rdma_cma.h")).unwrap();
        assert!(check(&include).unwrap_err().to_string().contains("rdma_cma.h"));
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn libclang_is_told_from_its_neighbours() {
        for name in ["libclang.so", "libclang.so.1", "libclang-14.so.13", "libclang-19.so"] {
            assert!(is_libclang(Path::new(name)), "{name}");
        }
        for name in ["libclang-cpp.so.14", "libclang-cpp14.so", "libclangAST.so", "libclang-14.a", "libclang.a"] {
            assert!(!is_libclang(Path::new(name)), "{name}");
        }
    }
}
