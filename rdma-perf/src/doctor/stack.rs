//! Facts that libibverbs reports about itself and its devices.

use rdma_safe::{Context, Device, LinkLayer, PortState, devices};

use crate::host::files::HostFiles;

/// Answers of libibverbs, or the errors of its calls.
#[derive(Debug)]
pub(crate) struct Stack {
    /// Path of the library.
    pub(crate) library: Result<Option<String>, String>,
    pub(crate) devices: Result<Vec<VerbsDevice>, String>,
}

#[derive(Debug)]
pub(crate) struct VerbsDevice {
    pub(crate) name: String,
    pub(crate) opened: Result<OpenedDevice, String>,
}

#[derive(Debug)]
pub(crate) struct OpenedDevice {
    pub(crate) firmware: String,
    pub(crate) ports: Vec<Port>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Port {
    pub(crate) number: u8,
    pub(crate) is_active: bool,
    pub(crate) is_ethernet: bool,
    /// In bytes; 0 if unknown.
    pub(crate) active_mtu: u32,
    pub(crate) max_mtu: u32,
}

impl Stack {
    pub(crate) fn query(host: &HostFiles) -> Stack {
        let library = match rdma_safe::sys::verbs() {
            Ok(_) => Ok(host.text("/proc/self/maps").ok().and_then(|maps| library_path(&maps))),
            Err(error) => Err(error.to_string()),
        };
        let devices = match devices() {
            Ok(devices) => Ok(devices.iter().map(VerbsDevice::of).collect()),
            Err(error) => Err(error.to_string()),
        };
        Stack { library, devices }
    }

    /// The device of this name, if libibverbs knows it.
    pub(crate) fn device(&self, name: &str) -> Option<&VerbsDevice> {
        self.devices.as_ref().ok()?.iter().find(|device| device.name == name)
    }

    /// A port of a device that could be opened.
    pub(crate) fn port(&self, device: &str, number: &str) -> Option<Port> {
        let opened = self.device(device)?.opened.as_ref().ok()?;
        opened.ports.iter().find(|port| port.number.to_string() == number).copied()
    }
}

impl VerbsDevice {
    fn of(device: &Device) -> VerbsDevice {
        let opened = device.open().map_err(|error| error.to_string());
        VerbsDevice { name: device.name(), opened: opened.map(|context| OpenedDevice::of(&context)) }
    }
}

impl OpenedDevice {
    fn of(context: &Context) -> OpenedDevice {
        let attributes = context.attributes();
        let ports = (1..=attributes.ports()).filter_map(|number| {
            let port = context.query_port(number).ok()?;
            Some(Port {
                number,
                is_active: matches!(port.state(), PortState::ACTIVE | PortState::ACTIVE_DEFER),
                is_ethernet: port.link_layer() == LinkLayer::ETHERNET,
                active_mtu: port.active_mtu().into(),
                max_mtu: port.max_mtu().into(),
            })
        });
        OpenedDevice { firmware: attributes.firmware_version(), ports: ports.collect() }
    }
}

/// The file that the dynamic linker loaded, from `proc_pid_maps(5)`.
fn library_path(maps: &str) -> Option<String> {
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    paths.into_iter().find(|path| path.contains("/libibverbs.so")).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_of_the_library_is_read_from_maps() {
        let maps = "7f00-7f01 r-xp 00000000 08:01 12   /usr/lib/libc.so.6\n\
                    7f02-7f03 r--p 00000000 08:01 13   /usr/lib/libibverbs.so.1.14.44.0\n\
                    7ffe-7fff rw-p 00000000 00:00 0    [stack]\n";
        assert_eq!(library_path(maps).as_deref(), Some("/usr/lib/libibverbs.so.1.14.44.0"));
        assert_eq!(library_path("7ffe-7fff rw-p 00000000 00:00 0    [stack]"), None);
    }
}
