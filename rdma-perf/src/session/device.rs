//! The device of an end, and its description for reports.

use std::fs;
use std::net::{IpAddr, Ipv6Addr};

use anyhow::{Context as _, Result, bail};
use rdma_safe::{Context, Device, Gid, InitOptions, LinkLayer, PortState, ProtectionDomain};

use crate::endpoint::cm::DevicePort;
use crate::report::Host;

/// An opened device with a port to use.
#[derive(Clone)]
pub(crate) struct OpenDevice {
    pub(crate) pd: ProtectionDomain,
    pub(crate) init: InitOptions,
    /// IP address of the GID, if it has one.
    pub(crate) ip: Option<IpAddr>,
    pub(crate) host: Host,
}

impl OpenDevice {
    pub(crate) fn device_port(&self) -> DevicePort<'_> {
        DevicePort { device: &self.host.device, port: self.host.port }
    }

    pub(crate) fn open(device: Option<&str>, ib_port: u8, gid_index: Option<u32>) -> Result<Self> {
        let requested = device.map(str::to_owned).or_else(|| std::env::var("RDMA_DEVICE").ok());
        let is_requested = requested.is_some_and(|name| name.starts_with("soft"));
        if rdma_safe::soft::install_for(device) && !is_requested {
            eprintln!("rdma-perf: no RDMA device found: using soft0, the software RNIC of this library");
        }
        let context = match device {
            Some(name) => Device::by_name(name)?.open()?,
            None => first_active(ib_port)?,
        };
        let port = context.query_port(ib_port)?;
        if port.state() != PortState::ACTIVE {
            bail!(
                "port {} of {} is {}: bring the link up, or run `rdma-perf doctor` to find the reason",
                ib_port,
                context.device_name(),
                port.state()
            );
        }
        let mut init = InitOptions::default().port(ib_port);
        let gid = match gid_index {
            Some(index) => {
                init = init.gid_index(index);
                Some(context.gid(ib_port, index)?)
            }
            None => context.recommended_gid(ib_port).ok(),
        };
        let host = Host {
            name: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            cpu: cpu(),
            device: context.device_name().to_owned(),
            port: ib_port,
            link_layer: port.link_layer().to_string(),
            gid: gid.map_or_else(String::new, |entry| entry.gid.to_string()),
            mtu: port.active_mtu().bytes().unwrap_or(0),
            extended_post: false,
            extended_poll: false,
        };
        let is_ethernet = port.link_layer() == LinkLayer::ETHERNET;
        let ip = gid.filter(|_| is_ethernet).and_then(|entry| address_of(entry.gid));
        Ok(OpenDevice { pd: context.alloc_pd()?, init, ip, host })
    }
}

/// The IP address of a RoCE GID. A link-local address is of no use to the peer, which would need its interface.
fn address_of(gid: Gid) -> Option<IpAddr> {
    let address = Ipv6Addr::from(gid);
    match gid.ipv4() {
        Some(address) => Some(address.into()),
        None => Some(address.into()).filter(|_| !address.is_unicast_link_local() && !address.is_unspecified()),
    }
}

fn first_active(port: u8) -> Result<Context> {
    let devices = rdma_safe::devices()?;
    let mut why = Vec::new();
    for device in &devices {
        match device.open().and_then(|context| Ok((context.query_port(port)?.state(), context))) {
            Ok((PortState::ACTIVE, context)) => return Ok(context),
            Ok((state, _)) => why.push(format!("{}: port {port} is {state}", device.name())),
            Err(error) => why.push(format!("{}: {error}", device.name())),
        }
    }
    if why.is_empty() {
        // Without any device, this error has the advice.
        Device::first().map(|_| ())?;
    }
    bail!("no device has an active port; `rdma-perf doctor` says what is missing ({})", why.join("; "))
}

fn cpu() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    model.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

/// Peak resident memory of this process, in bytes.
pub(crate) fn peak_resident() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status").context("cannot read /proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    Ok(kib.context("/proc/self/status has no VmHWM")? * 1024)
}
