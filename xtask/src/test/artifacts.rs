//! What cargo says it has built.

use std::path::PathBuf;

use serde::Deserialize;

/// Where a test program can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Anywhere,
    /// Where an RDMA device is.
    Device,
    /// On two machines with a device each, on both at a time.
    Hosts,
}

impl Place {
    /// By what a `tests/` folder calls the program, in whichever package.
    fn of(name: &str) -> Place {
        match name {
            "device" => Place::Device,
            "hosts" => Place::Hosts,
            _ => Place::Anywhere,
        }
    }
}

/// A test program made of one file of a `tests/` folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IntegrationTest {
    pub(crate) package: String,
    pub(crate) name: String,
    pub(crate) executable: PathBuf,
    pub(crate) place: Place,
}

#[derive(Deserialize)]
struct Message {
    #[serde(default)]
    package_id: String,
    target: Option<Target>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

/// The integration test in one line of `cargo test --no-run --message-format=json`, if it is about one.
pub(crate) fn integration_test(line: &str) -> Option<IntegrationTest> {
    let message: Message = serde_json::from_str(line).ok()?;
    let (target, executable) = (message.target?, message.executable?);
    if !target.kind.iter().any(|kind| kind == "test") {
        return None;
    }
    let package = package_name(&message.package_id).to_owned();
    let place = Place::of(&target.name);
    Some(IntegrationTest { package, name: target.name, executable, place })
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
            r#"{{"reason":"compiler-artifact","package_id":"path+file:///w/{package}","target":{{"kind":["{kind}"],
            "name":"{name}"}},"profile":{{"test":true}},"executable":"/t/{name}-1"}}"#
        )
    }

    #[test]
    fn tests_called_device_need_one_in_whichever_package() {
        for package in ["rdma-stack", "rdma-perf"] {
            let test = integration_test(&message(&format!("{package}#0.1.0"), "test", "device")).unwrap();
            assert_eq!((test.package.as_str(), test.executable), (package, PathBuf::from("/t/device-1")));
            assert_eq!(test.place, Place::Device);
        }
    }

    #[test]
    fn tests_called_hosts_need_two_machines() {
        let test = integration_test(&message("rdma-stack#0.1.0", "test", "hosts")).unwrap();
        assert_eq!(test.place, Place::Hosts);
    }

    #[test]
    fn other_tests_need_none() {
        for (package, name) in [("x#rdma-stack@0.1.0", "compile_fail"), ("rdma-sys#0.1.0", "parity")] {
            assert_eq!(integration_test(&message(package, "test", name)).unwrap().place, Place::Anywhere, "{name}");
        }
    }

    #[test]
    fn examples_unit_tests_and_other_messages_are_not_integration_tests() {
        assert_eq!(integration_test(&message("x#rdma-stack@0.1.0", "example", "devinfo")), None);
        assert_eq!(integration_test(&message("rdma-sys#0.1.0", "lib", "rdma_sys")), None);
        assert_eq!(integration_test(r#"{"reason":"build-finished","success":true}"#), None);
        assert_eq!(integration_test("not JSON"), None);
    }
}
