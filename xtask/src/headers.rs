//! Provides the C headers that rdma-sys binds, and libclang for bindgen, on machines without them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};

use crate::apt::{self, Apt};
use crate::process;

/// Release of rdma-core that the bindings are generated from. Keep it equal to the one in `xtask/bindgen/src/main.rs`.
const RDMA_CORE: &str = "56.1";
/// Debian suite that contains this release.
const SUITE: &str = "trixie";
const PACKAGES: [&str; 2] = ["libibverbs-dev", "librdmacm-dev"];

/// Path of the include directory of rdma-core 56.1.
///
/// The headers come from `RDMA_CORE_INCLUDE`, from an installed package, or from Debian packages that are unpacked below
/// `target_dir` without being installed.
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
    let cache = target_dir.join("rdma-core-headers").join(RDMA_CORE);
    let include = cache.join("usr/include");
    if check(&include).is_err() {
        download(&cache).with_context(|| {
            format!(
                "no headers of rdma-core {RDMA_CORE} (unpack {} of that release and set RDMA_CORE_INCLUDE to the \
                 directory that contains infiniband/ and rdma/)",
                PACKAGES.join(" and ")
            )
        })?;
        check(&include)?;
    }
    Ok(include)
}

/// Checks that `include` contains the headers, and that it does not name another release.
fn check(include: &Path) -> Result<()> {
    for header in ["infiniband/verbs.h", "rdma/rdma_cma.h", "rdma/rdma_verbs.h"] {
        if !include.join(header).is_file() {
            bail!("{} is missing", include.join(header).display());
        }
    }
    match version(include) {
        Some(version) if version != RDMA_CORE => {
            bail!("these are the headers of rdma-core {version}, but the bindings need {RDMA_CORE}")
        }
        // Headers do not contain their release. Without a pkg-config file next to them, trust the user.
        _ => Ok(()),
    }
}

/// Release in the pkg-config file that belongs to an include directory: 56.1 for `Version: 1.14.56.1`.
fn version(include: &Path) -> Option<String> {
    let prefix = include.parent()?;
    let mut directories = vec![prefix.join("lib64"), prefix.join("lib")];
    directories.extend(entries(&prefix.join("lib")));
    let text = directories.iter().find_map(|dir| fs::read_to_string(dir.join("pkgconfig/libibverbs.pc")).ok())?;
    let version = text.lines().find_map(|line| line.strip_prefix("Version:"))?.trim();
    version.splitn(3, '.').nth(2).map(str::to_owned)
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

/// Downloads the packages from one of this machine's repositories and unpacks them into `cache`.
fn download(cache: &Path) -> Result<()> {
    // Another process may download at the same time, so each process uses a separate directory and renames it at the end.
    let work = cache.with_extension(format!("{}.tmp", std::process::id()));
    let result = download_in(&work, cache);
    _ = fs::remove_dir_all(&work);
    result
}

fn download_in(work: &Path, cache: &Path) -> Result<()> {
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
    // An existing directory failed the check, or there would be no download.
    _ = fs::remove_dir_all(cache);
    match fs::rename(&root, cache) {
        Err(error) if check(&cache.join("usr/include")).is_err() => Err(error).context("cannot store the headers"),
        _ => Ok(()),
    }
}

/// Downloads the packages from `repository` and checks their release.
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

/// Whether bindgen will find libclang and clang's own headers.
fn libclang_present() -> bool {
    if let Some(path) = std::env::var_os("LIBCLANG_PATH") {
        let path = PathBuf::from(path);
        return path.is_file() || entries(&path).iter().any(|path| is_libclang(path));
    }
    // /usr/lib64 on Fedora, /usr/lib/<triplet> and /usr/lib/llvm-<version>/lib on Debian.
    let mut directories: Vec<PathBuf> = ["/usr/lib", "/usr/lib64", "/usr/local/lib"].map(PathBuf::from).into();
    for _ in 0..2 {
        let below: Vec<PathBuf> =
            directories.iter().flat_map(|dir| entries(dir)).filter(|path| path.is_dir()).collect();
        directories.extend(below);
        directories.sort_unstable();
        directories.dedup();
    }
    let library = directories.iter().any(|dir| entries(dir).iter().any(|path| is_libclang(path)));
    let own_headers = directories.iter().any(|dir| {
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

/// Ensures that bindgen finds libclang, and installs it if this process may.
pub(crate) fn libclang() -> Result<()> {
    apt::install_unless(libclang_present, "libclang-dev")
        .context("bindgen needs libclang (set LIBCLANG_PATH if it is in an unusual place)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_another_release_are_refused() {
        let dir = std::env::temp_dir().join(format!("headers-{}", std::process::id()));
        let include = dir.join("include");
        for header in ["infiniband/verbs.h", "rdma/rdma_cma.h", "rdma/rdma_verbs.h"] {
            let path = include.join(header);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        assert!(check(&include).is_ok(), "headers without a pkg-config file are trusted");

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
    fn libclang_is_distinguished_from_similar_libraries() {
        for name in ["libclang.so", "libclang.so.1", "libclang-14.so.13", "libclang-19.so"] {
            assert!(is_libclang(Path::new(name)), "{name}");
        }
        for name in ["libclang-cpp.so.14", "libclang-cpp14.so", "libclangAST.so", "libclang-14.a", "libclang.a"] {
            assert!(!is_libclang(Path::new(name)), "{name}");
        }
    }
}
