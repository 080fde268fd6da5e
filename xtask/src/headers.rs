//! The C headers that rdma-sys binds, and the libclang that binds them, on machines that have neither.

use std::collections::BTreeSet;
use std::error::Error;
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The release that `rdma-sys/src/bindings.rs` comes from, as `xtask/bindgen` records it, and the Debian suite that
/// has it.
const RDMA_CORE: &str = "56.1";
const SUITE: &str = "trixie";
const PACKAGES: [&str; 2] = ["libibverbs-dev", "librdmacm-dev"];
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Why something cannot be had on this machine, and what would help.
#[derive(Debug)]
pub(crate) struct Unavailable {
    pub(crate) reason: String,
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl Error for Unavailable {}

fn unavailable(reason: impl Into<String>) -> Unavailable {
    Unavailable { reason: reason.into() }
}

/// The include folder of rdma-core 56.1: that of `RDMA_CORE_INCLUDE`, of an installed package, or of Debian packages
/// that are unpacked below `target_dir` and not installed.
pub(crate) fn headers(target_dir: &Path) -> Result<PathBuf, Unavailable> {
    if let Some(dir) = std::env::var_os("RDMA_CORE_INCLUDE") {
        let dir = PathBuf::from(dir);
        check(&dir).map_err(|why| unavailable(format!("RDMA_CORE_INCLUDE={}: {why}", dir.display())))?;
        return Ok(dir);
    }
    let installed = Path::new("/usr/include");
    if version(installed).as_deref() == Some(RDMA_CORE) && check(installed).is_ok() {
        return Ok(installed.to_owned());
    }
    let kept = target_dir.join("rdma-core-headers").join(RDMA_CORE);
    let include = kept.join("usr/include");
    if check(&include).is_err() {
        download(&kept).map_err(|why| {
            unavailable(format!(
                "no headers of rdma-core {RDMA_CORE}: {why}; unpack {} of that release and set RDMA_CORE_INCLUDE to \
                 the folder that holds infiniband/ and rdma/",
                PACKAGES.join(" and ")
            ))
        })?;
        check(&include).map_err(unavailable)?;
    }
    Ok(include)
}

/// Refuses a folder that lacks the headers, or that says it has those of another release.
fn check(include: &Path) -> Result<(), String> {
    for header in ["infiniband/verbs.h", "rdma/rdma_cma.h", "rdma/rdma_verbs.h"] {
        if !include.join(header).is_file() {
            return Err(format!("{} is missing", include.join(header).display()));
        }
    }
    match version(include) {
        Some(version) if version != RDMA_CORE => {
            Err(format!("these are headers of rdma-core {version}, the bindings are of {RDMA_CORE}"))
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

/// Fetches the packages from the archive that this machine installs from and unpacks them into `kept`.
fn download(kept: &Path) -> Result<(), String> {
    for tool in ["apt-get", "dpkg", "dpkg-deb"] {
        run(Command::new(tool).arg("--version")).map_err(|why| format!("this is no Debian-like machine ({why})"))?;
    }
    // Another process may be at it: each works in a folder of its own, and one rename decides.
    let work = kept.with_extension(format!("{}.tmp", std::process::id()));
    let result = download_in(&work, kept);
    _ = fs::remove_dir_all(&work);
    result
}

fn download_in(work: &Path, kept: &Path) -> Result<(), String> {
    let failed = |what: &str, error: std::io::Error| format!("{what}: {error}");
    for dir in ["lists/partial", "cache/archives/partial", "debs"] {
        fs::create_dir_all(work.join(dir)).map_err(|error| failed("creating a work folder", error))?;
    }
    let work = work.canonicalize().map_err(|error| failed("the work folder", error))?;
    let mut why = String::from("apt has no sources");
    for archive in archives()? {
        match fetch(&work, &archive) {
            Ok(()) => {
                let root = work.join("root");
                for deb in entries(&work.join("debs")) {
                    run(Command::new("dpkg").arg("-x").arg(deb).arg(&root))?;
                }
                check(&root.join("usr/include"))?;
                // What is there fails the check, or nobody would be here.
                _ = fs::remove_dir_all(kept);
                return match fs::rename(&root, kept) {
                    Err(error) if check(&kept.join("usr/include")).is_err() => {
                        Err(failed("keeping the headers", error))
                    }
                    _ => Ok(()),
                };
            }
            Err(error) => why = error,
        }
    }
    Err(why)
}

/// The archives that apt installs from, Debian's own suite first, without the security archive, which has no `trixie`.
/// apt reads its own configuration here, so each form of sources file is understood.
fn archives() -> Result<Vec<String>, String> {
    let listing = run(Command::new("apt-get").args(["update", "--print-uris"]))?;
    let codename = fs::read_to_string("/etc/os-release")
        .unwrap_or_default()
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
        .unwrap_or_default()
        .to_owned();
    let (mut first, mut rest) = (Vec::new(), Vec::new());
    let mut seen = BTreeSet::new();
    for line in listing.lines() {
        let uri = line.trim_start_matches('\'').split('\'').next().unwrap_or_default();
        let Some((archive, path)) = uri.split_once("/dists/") else {
            continue;
        };
        if archive.ends_with("-security") || !seen.insert(archive.to_owned()) {
            continue;
        }
        let own = path.split('/').next() == Some(codename.as_str());
        if own { &mut first } else { &mut rest }.push(archive.to_owned());
    }
    first.extend(rest);
    Ok(first)
}

/// Downloads the packages with lists and a cache of their own: apt's state on this machine stays as it is.
fn fetch(work: &Path, archive: &str) -> Result<(), String> {
    let list = work.join("sources.list");
    let signed = if Path::new(KEYRING).is_file() { format!("[signed-by={KEYRING}] ") } else { String::new() };
    fs::write(&list, format!("deb {signed}{archive} {SUITE} main\n")).map_err(|error| error.to_string())?;
    // What is installed here must not be a candidate.
    let status = work.join("status");
    fs::write(&status, "").map_err(|error| error.to_string())?;
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        let option = |command: &mut Command, name: &str, value: &OsStr| {
            let mut text = std::ffi::OsString::from(format!("{name}="));
            text.push(value);
            command.arg("-o").arg(text);
        };
        option(&mut command, "Dir::Etc::sourcelist", list.as_os_str());
        option(&mut command, "Dir::Etc::sourceparts", OsStr::new("/dev/null"));
        option(&mut command, "Dir::State::lists", work.join("lists").as_os_str());
        option(&mut command, "Dir::State::status", status.as_os_str());
        option(&mut command, "Dir::Cache", work.join("cache").as_os_str());
        // Root's folders are closed to the user _apt, which downloads otherwise.
        option(&mut command, "APT::Sandbox::User", OsStr::new("root"));
        option(&mut command, "Acquire::http::Timeout", OsStr::new("30"));
        option(&mut command, "Acquire::Languages", OsStr::new("none"));
        run(command.arg("--quiet").args(arguments).current_dir(work.join("debs")))
    };
    eprintln!("rdma-core {RDMA_CORE} headers: reading the package list of {SUITE}");
    // Without this option a failed download is a warning.
    apt(&["-o", "APT::Update::Error-Mode=any", "update"])?;
    eprintln!("rdma-core {RDMA_CORE} headers: downloading {}", PACKAGES.join(" and "));
    apt(&[&["download"][..], &PACKAGES].concat())?;
    for package in PACKAGES {
        let deb = entries(&work.join("debs"))
            .into_iter()
            .find(|path| {
                path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&format!("{package}_")))
            })
            .ok_or_else(|| format!("{package} was not downloaded"))?;
        let version = run(Command::new("dpkg-deb").arg("--field").arg(deb).arg("Version"))?;
        let release = version.trim().split('-').next().unwrap_or_default();
        if release != RDMA_CORE {
            return Err(format!("{SUITE} has {package} {}, not {RDMA_CORE}", version.trim()));
        }
    }
    Ok(())
}

/// Whether bindgen will find libclang and the headers that belong to it.
pub(crate) fn libclang_present() -> bool {
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
pub(crate) fn libclang() -> Result<(), Unavailable> {
    const INSTALL: [&str; 5] = ["apt-get", "install", "--yes", "--no-install-recommends", "libclang-dev"];
    if libclang_present() {
        return Ok(());
    }
    let command = INSTALL.join(" ");
    let apt = run(Command::new("apt-get").arg("--version")).is_ok();
    let root = run(Command::new("id").arg("-u")).is_ok_and(|user| user.trim() == "0");
    if !apt || !root {
        let how = if apt { format!("as root: {command}") } else { "install libclang, or set LIBCLANG_PATH".to_owned() };
        return Err(unavailable(format!("bindgen needs libclang; {how}")));
    }
    let install = || {
        let mut command = Command::new(INSTALL[0]);
        run(command.args(&INSTALL[1..]).env("DEBIAN_FRONTEND", "noninteractive"))
    };
    eprintln!("libclang: {command}");
    // The package list may be missing or too old to download from.
    install()
        .or_else(|_| run(Command::new("apt-get").arg("update")).and_then(|_| install()))
        .map_err(|why| unavailable(format!("bindgen needs libclang, and it could not be installed: {why}")))?;
    if libclang_present() { Ok(()) } else { Err(unavailable(format!("`{command}` brought no libclang"))) }
}

/// Runs a program to its end. Returns its output, or the last lines of what it said.
fn run(command: &mut Command) -> Result<String, String> {
    const LINES: usize = 5;
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(Stdio::null())
        .env("LC_ALL", "C")
        .output()
        .map_err(|error| format!("starting {program}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
    let last = lines[lines.len().saturating_sub(LINES)..].join("; ");
    Err(format!("{program} failed ({}): {last}", output.status))
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
        assert_eq!(check(&include), Ok(()), "no pkg-config file: trusted");

        let pkgconfig = dir.join("lib/x86_64-linux-gnu/pkgconfig");
        fs::create_dir_all(&pkgconfig).unwrap();
        fs::write(pkgconfig.join("libibverbs.pc"), "Name: libibverbs\nVersion: 1.14.44.0\n").unwrap();
        assert!(check(&include).unwrap_err().contains("44.0"));

        fs::write(pkgconfig.join("libibverbs.pc"), format!("Version: 1.14.{RDMA_CORE}\n")).unwrap();
        assert_eq!(check(&include), Ok(()));

        fs::remove_file(include.join("rdma/rdma_cma.h")).unwrap();
        assert!(check(&include).unwrap_err().contains("rdma_cma.h"));
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
