//! libibverbs and its providers.

use std::path::Path;

use super::finding::{Finding, Topic};
use super::stack::Stack;
use crate::host::files::HostFiles;

const PACKAGES: &str = "apt install ibverbs-providers (Debian, Ubuntu), dnf install libibverbs (Fedora, RHEL)";

pub(crate) fn check(host: &HostFiles, stack: &Stack) -> Vec<Finding> {
    match &stack.library {
        // The error names the packages and the environment variable.
        Err(error) => vec![Topic::Library.problem(error)],
        Ok(path) => {
            let version = path.as_deref().and_then(rdma_core_version);
            let version =
                version.map_or_else(|| "libibverbs".into(), |version| format!("libibverbs of rdma-core {version}"));
            let at = path.as_ref().map_or_else(String::new, |path| format!(": {path}"));
            let mut findings = vec![Topic::Library.ok(format!("{version}{at}"))];
            if let Some(path) = path {
                findings.push(providers(host, path));
            }
            findings
        }
    }
}

/// The rdma-core release in a file name such as `libibverbs.so.1.14.44.0`.
fn rdma_core_version(path: &str) -> Option<&str> {
    let mut numbers = path.rsplit_once(".so.")?.1.split('.').skip(2);
    numbers.next().filter(|release| release.parse::<u32>().is_ok_and(|release| release > 10))
}

/// libibverbs loads `lib*-rdmav*.so` from a directory next to itself, by the names in `/etc/libibverbs.d`.
fn providers(host: &HostFiles, library: &str) -> Finding {
    let Some(directory) = Path::new(library).parent().map(|parent| parent.join("libibverbs")) else {
        return Topic::Library.note(format!("the directory of {library}'s providers is unknown"));
    };
    let directory = directory.to_string_lossy();
    let names = match host.names(&directory) {
        Ok(names) => names,
        Err(error) => return Topic::Library.note(error.to_string()),
    };
    let mut providers: Vec<&str> =
        names.iter().filter_map(|name| name.strip_prefix("lib")?.split_once("-rdmav")).map(|(name, _)| name).collect();
    providers.sort_unstable();
    providers.dedup();
    if providers.is_empty() {
        return Topic::Library
            .problem(format!("there are no providers in {directory}"))
            .why("libibverbs needs the provider of a device's driver to find the device.")
            .fix(PACKAGES);
    }
    Topic::Library.ok(format!("providers: {}", providers.join(" ")))
}

/// The finding for a device that only the kernel knows.
pub(crate) fn missing_provider(device: &str, driver: Option<&str>) -> Finding {
    let driver = driver.map_or_else(String::new, |driver| format!(" (driver {driver})"));
    Topic::Library
        .problem(format!("libibverbs does not know {device}{driver}, which the kernel has"))
        .why(
            "The provider of its driver is missing, or of another version than libibverbs, or \
             /etc/libibverbs.d does not name it.",
        )
        .fix(PACKAGES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;
    use crate::testing::scratch::Scratch;

    fn stack(library: Result<Option<&str>, &str>) -> Stack {
        Stack { library: library.map(|path| path.map(String::from)).map_err(String::from), devices: Ok(Vec::new()) }
    }

    #[test]
    fn the_version_is_read_from_the_file_name() {
        assert_eq!(rdma_core_version("/usr/lib/libibverbs.so.1.14.44.0"), Some("44"));
        assert_eq!(rdma_core_version("/usr/lib64/libibverbs.so.1.15.61.2"), Some("61"));
        for path in ["/usr/lib/libibverbs.so.1", "/opt/fake.so", "/opt/libibverbs.so.1.0.0"] {
            assert_eq!(rdma_core_version(path), None, "{path}");
        }
    }

    #[test]
    fn providers_are_found_next_to_the_library() {
        let scratch = Scratch::new();
        let host = HostFiles::new(scratch.path(""));
        let stack = stack(Ok(Some("/usr/lib/libibverbs.so.1.14.44.0")));
        let findings = check(&host, &stack);
        assert_eq!(findings[0].what, "libibverbs of rdma-core 44: /usr/lib/libibverbs.so.1.14.44.0");
        assert_eq!((findings[1].level, findings[1].fix.as_deref()), (Level::Problem, Some(PACKAGES)), "no directory");
        scratch.write("/usr/lib/libibverbs/notes", "");
        assert_eq!(check(&host, &stack)[1].level, Level::Problem, "the directory has no provider");
        scratch.write("/usr/lib/libibverbs/librxe-rdmav34.so", "");
        scratch.write("/usr/lib/libibverbs/libmlx5-rdmav34.so", "");
        scratch.write("/usr/lib/libibverbs/notes", "");
        assert_eq!(check(&host, &stack)[1], Topic::Library.ok("providers: mlx5 rxe"));
    }

    #[test]
    fn a_missing_library_is_a_problem_with_its_advice() {
        let host = HostFiles::new("/nowhere");
        let findings = check(&host, &stack(Err("cannot load libibverbs.so.1: install rdma-core")));
        assert_eq!(findings, [Topic::Library.problem("cannot load libibverbs.so.1: install rdma-core")]);
        assert_eq!(check(&host, &stack(Ok(None))), [Topic::Library.ok("libibverbs")]);
    }
}
