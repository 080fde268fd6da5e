//! Test programs that cargo has built, read from its JSON messages.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Where a test program can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Place {
    Anywhere,
    /// On a machine with an RDMA device.
    Device,
    /// On two machines at the same time, each with a device.
    Hosts,
}

impl Place {
    /// The place for a test program with this name, in any package.
    fn of(name: &str) -> Place {
        match name {
            "device" => Place::Device,
            "hosts" => Place::Hosts,
            _ => Place::Anywhere,
        }
    }
}

/// A test program that cargo has built.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TestProgram {
    pub(crate) package: String,
    /// The name of its target: a file of `tests/`, an example, a library.
    pub(crate) name: String,
    pub(crate) executable: PathBuf,
    /// The package's folder, in which cargo would run it.
    pub(crate) folder: PathBuf,
    pub(crate) place: Place,
}

#[derive(Deserialize)]
struct Message {
    #[serde(default)]
    package_id: String,
    #[serde(default)]
    manifest_path: PathBuf,
    target: Option<Target>,
    profile: Option<Profile>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// The test program in one line of `cargo test --no-run --message-format=json`, if the line is about one.
pub(crate) fn test_program(line: &str) -> Option<TestProgram> {
    let message: Message = serde_json::from_str(line).ok()?;
    let (target, executable) = (message.target?, message.executable?);
    if !message.profile?.test {
        return None;
    }
    let package = package_name(&message.package_id).to_owned();
    let folder = message.manifest_path.parent()?.to_owned();
    let is_integration_test = target.kind.iter().any(|kind| kind == "test");
    let place = if is_integration_test { Place::of(&target.name) } else { Place::Anywhere };
    Some(TestProgram { package, name: target.name, executable, folder, place })
}

/// `rdma-sys` of `path+file:///home/me/work#rdma-sys@0.1.0` and of `path+file:///home/me/rdma-sys#0.1.0`.
fn package_name(id: &str) -> &str {
    let (place, version) = id.rsplit_once('#').unwrap_or(("", id));
    match version.split_once('@') {
        Some((name, _)) => name,
        None => place.rsplit('/').next().unwrap_or(place),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(package: &str, kind: &str, name: &str) -> String {
        format!(
            r#"{{"reason":"compiler-artifact","package_id":"path+file:///w/{package}","manifest_path":"/w/x/Cargo.toml",
            "target":{{"kind":["{kind}"],"name":"{name}"}},"profile":{{"test":true}},"executable":"/t/{name}-1"}}"#
        )
        .replace('\n', "")
    }

    #[test]
    fn tests_called_device_need_a_device_in_any_package() {
        for package in ["rdma-tests", "rdma-perf"] {
            let test = test_program(&message(&format!("{package}#0.1.0"), "test", "device")).unwrap();
            assert_eq!((test.package.as_str(), test.executable), (package, PathBuf::from("/t/device-1")));
            assert_eq!((test.place, test.folder), (Place::Device, PathBuf::from("/w/x")));
        }
    }

    #[test]
    fn tests_called_hosts_need_two_machines() {
        let test = test_program(&message("rdma-tests#0.1.0", "test", "hosts")).unwrap();
        assert_eq!(test.place, Place::Hosts);
    }

    #[test]
    fn other_tests_need_neither() {
        let others = [
            ("x#rdma-tests@0.1.0", "test", "compile_fail"),
            ("rdma-sys#0.1.0", "test", "parity"),
            ("rdma-sys#0.1.0", "lib", "rdma_sys"),
            ("x#rdma-examples@0.1.0", "example", "device"),
        ];
        for (package, kind, name) in others {
            assert_eq!(test_program(&message(package, kind, name)).unwrap().place, Place::Anywhere, "{name}");
        }
    }

    #[test]
    fn programs_and_other_messages_are_not_test_programs() {
        let example = message("x#rdma-examples@0.1.0", "example", "devinfo");
        assert_eq!(test_program(&example.replace(r#""test":true"#, r#""test":false"#)), None);
        assert_eq!(test_program(r#"{"reason":"build-finished","success":true}"#), None);
        assert_eq!(test_program("not JSON"), None);
    }
}
