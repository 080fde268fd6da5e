//! Removal of a device while connections and other objects use it.

use std::net::Ipv4Addr;

use rdma_safe::async_event::AsyncEventType;
use rdma_safe::cm::{
    Cause, CmError, CmId, ConnectParameters, Connection, Connector, EventChannel, EventKind, Id, Listener, PortSpace,
    PreparedRoute, Request, Step,
};
use rdma_safe::mr::Pages;
use rdma_safe::{
    Access, AsyncEvents, Context, Device, Endpoint, Errno, Error, ExposedRegion, InitOptions, Operation,
    QueuePairState, WcStatus, soft,
};

use crate::cm::{RESOLVE, resolved};
use crate::cm_connections::{connected, failure};
use crate::cm_soft::soft_device;
use crate::support::child::{in_own_process, open_files};
use crate::support::link::connected as connected_endpoints;
use crate::support::own_device::OwnDevice;
use crate::support::peer::{self, Peer};
use crate::support::{DEADLINE, Rdma, device, error_of, filled, within_deadline};

/// The device that is removed, and an address of it.
struct Removed {
    name: String,
    address: Ipv4Addr,
    is_soft: bool,
}

impl Removed {
    fn new(rdma: &Rdma) -> Removed {
        match rdma.is_soft() {
            true => Removed { name: rdma.device_name().into(), address: Ipv4Addr::LOCALHOST, is_soft: true },
            false => Removed { name: OwnDevice::NAME.into(), address: OwnDevice::ADDRESS, is_soft: false },
        }
    }
}

/// An object of each kind that keeps the device open.
struct Objects {
    device: Removed,
    context: Context,
    events: AsyncEvents,
    connector: Connector,
    listener: Listener,
    connections: (Connection, Connection),
    channel: EventChannel,
    /// One bound, one resolved, and one that has sent a request.
    ids: [Id; 3],
    route: PreparedRoute,
    request: Request,
    region: ExposedRegion,
}

impl Objects {
    fn new(device: Removed, connector: &Connector, mut listener: Listener) -> Objects {
        let local = listener.local_address();
        let context = Device::by_name(&device.name).unwrap().open().unwrap();
        let connections = connected(connector, &mut listener);
        let channel = EventChannel::new().unwrap();
        let mut bound = Id::new(&channel, PortSpace::TCP).unwrap();
        bound.bind((device.address, 0)).unwrap();
        let [found, mut asking] = [0, 1].map(|_| resolved(&channel, local.ip().unwrap()));
        asking.connect(&ConnectParameters::new(0x30_0001)).unwrap();
        let request = listener.next(DEADLINE).unwrap().expect("a request in time");
        let route = connector.resolve(local).unwrap();
        let pd = route.pd().clone();
        let route = route.prepare(Endpoint::builder(&pd)).unwrap();
        let region = pd.expose(Pages::new(4096).unwrap(), Access::REMOTE).unwrap();
        let events = context.async_events().unwrap();
        let (connector, ids) = (connector.clone(), [bound, found, asking]);
        Objects { device, context, events, connector, listener, connections, channel, ids, route, request, region }
    }

    /// Checks that each object reports the removal of the device.
    fn expect_removal_events(&mut self) {
        let Objects { listener, connections: (a, b), ids, .. } = self;
        for _ in 0..2 {
            let error = failure(error_of(listener.next(2 * DEADLINE)));
            assert_eq!((error.step, error.cause), (Step::Accept, Cause::DeviceRemoved));
        }
        for connection in [a, b] {
            let flushed = connection.wait(DEADLINE).unwrap();
            assert_eq!((flushed.operation, flushed.status), (Operation::Receive, WcStatus::WR_FLUSH_ERR));
            assert!(!connection.is_connected().unwrap());
            let error = failure(error_of(connection.wait(DEADLINE)));
            assert_eq!((error.step, error.cause), (Step::Transfer, Cause::Disconnected));
        }
        let mut reported: Vec<CmId> = Vec::new();
        while reported.len() < ids.len() {
            let event = self.channel.wait(DEADLINE).unwrap().expect("an event of each id");
            assert!(matches!(event.kind, EventKind::DeviceRemoval), "{event:?}");
            reported.push(event.id);
        }
        assert!(ids.iter().all(|id| reported.contains(&id.id())), "{reported:?}");
        // rxe lets a process keep the device open and reports no fatal event.
        let fatal = self.events.try_event().unwrap().map(|event| event.event_type);
        assert_eq!(fatal, self.device.is_soft.then_some(AsyncEventType::DEVICE_FATAL));
    }

    /// Checks that ids refuse calls with the reason, and that objects of the device stay usable.
    fn expect_refusals(&mut self) {
        let [_, found, _] = &mut self.ids;
        let channel = EventChannel::new().unwrap();
        let parameters = ConnectParameters::new(0x30_0002);
        for refused in [
            found.resolve_route(RESOLVE),
            found.connect(&parameters),
            found.establish(),
            found.disconnect(),
            found.migrate(&channel),
            found.set_type_of_service(8),
            found.attributes(QueuePairState::INIT).map(drop),
        ] {
            let error = error_of(refused);
            assert!(matches!(error, Error::Cm(CmError::Call { errno: Errno(libc::ENXIO), .. })), "{error}");
            assert!(error.to_string().contains("its device was removed"), "{error}");
        }
        assert!(found.channel().is_same(&self.channel));
        assert_eq!(found.device_name().as_deref(), Some(&*self.device.name));
        let there = self.listener.local_address().ip().unwrap();
        let error = failure(error_of(self.connector.connect(there)));
        assert_eq!((error.step, error.cause), (Step::ResolveAddress, Cause::Failed(Errno(libc::ENODEV))));
        let error = error_of(Device::by_name(&self.device.name));
        assert!(matches!(error, Error::DeviceNotFound { .. } | Error::NoDevice), "{error}");
        let (a, _) = &mut self.connections;
        let outbox = filled(a.pd(), b"into the void");
        a.send(outbox).unwrap();
        assert_eq!(a.wait(DEADLINE).unwrap().status, WcStatus::WR_FLUSH_ERR);
        self.region.store_u64(0, 7).unwrap();
        self.context.alloc_pd().unwrap();
    }

    /// Ends each object, beginning with number `first`. Pending requests fail because the device was removed.
    fn end_all(self, first: usize) {
        let Objects {
            device: _,
            context,
            events,
            connector,
            listener,
            connections: (a, b),
            channel,
            ids,
            route,
            request,
            region,
        } = self;
        let pd = request.pd().unwrap();
        let [bound, found, asking] = ids;
        let ends: [Box<dyn FnOnce()>; 12] = [
            Box::new(|| assert_eq!(a.disconnect().unwrap().len(), 0)),
            Box::new(|| drop(b)),
            Box::new(|| drop(context)),
            Box::new(|| drop(events)),
            Box::new(|| drop(connector)),
            Box::new(|| drop(listener)),
            Box::new(|| drop(channel)),
            Box::new(|| bound.destroy().unwrap()),
            Box::new(|| drop((found, asking))),
            Box::new(|| {
                let error = failure(error_of(route.connect(b"")));
                assert_eq!((error.step, error.cause), (Step::Connect, Cause::DeviceRemoved));
            }),
            Box::new(move || {
                let error = failure(error_of(request.prepare(Endpoint::builder(&pd))));
                assert_eq!((error.step, error.cause), (Step::Accept, Cause::DeviceRemoved));
            }),
            Box::new(|| drop(region)),
        ];
        let mut ends = Vec::from(ends);
        ends.rotate_left(first);
        ends.into_iter().for_each(|end| end());
    }
}

#[test]
fn objects_of_a_removed_device_report_it_and_can_be_dropped_in_any_order() {
    const NAME: &str = "cm_unplug::objects_of_a_removed_device_report_it_and_can_be_dropped_in_any_order";
    let Some(rdma) = device() else { return };
    if let Some(first) = peer::role() {
        let connector = Connector::new();
        let device = Removed::new(&rdma);
        let (address, is_soft) = (device.address, device.is_soft);
        // The first connection opens the device, here and in librdmacm.
        let mut listener = Listener::bind((address, 0)).unwrap();
        drop(connected(&connector, &mut listener));
        drop(listener);
        let before = open_files();
        let listener = Listener::bind((address, 0)).unwrap();
        let mut objects = Objects::new(device, &connector, listener);
        peer::report("ready");
        if is_soft {
            soft::remove();
        }
        objects.expect_removal_events();
        objects.expect_refusals();
        objects.end_all(first.parse().unwrap());
        assert_eq!(open_files(), before);
        drop(connector);
        peer::report("dropped");
        peer::wait_to_be_killed();
    }
    for first in [0, 1, 2, 5, 7, 10] {
        if rdma.is_soft() {
            let mut holder = Peer::start(NAME, first);
            assert_eq!([holder.next_report(), holder.next_report()], ["ready", "dropped"]);
            continue;
        }
        let Some(own) = OwnDevice::new(&rdma) else { return };
        let mut holder = Peer::start(NAME, first);
        assert_eq!(holder.next_report(), "ready");
        let mut removing = own.remove();
        assert_eq!(holder.next_report(), "dropped");
        // librdmacm keeps the device open until the process ends.
        assert!(removing.try_wait().unwrap().is_none());
        holder.kill();
        let removed = within_deadline("the removal", || removing.try_wait().unwrap());
        assert!(removed.success() && !own.exists());
    }
}

#[test]
fn a_removed_device_disappears_once_it_is_closed() {
    let Some(rdma) = device() else { return };
    let Some(own) = OwnDevice::new(&rdma) else { return };
    let pd = Device::by_name(OwnDevice::NAME).unwrap().open().unwrap().alloc_pd().unwrap();
    let (mut a, mut b) = connected_endpoints(Endpoint::builder(&pd));
    let mut removing = own.remove();
    within_deadline("the start of the removal", || Device::by_name(OwnDevice::NAME).is_err().then_some(()));
    // Open contexts stay usable.
    b.receive(pd.allocate(64).unwrap()).unwrap();
    a.send(filled(&pd, b"still here")).unwrap();
    assert_eq!(b.wait(DEADLINE).unwrap().ok().unwrap().buffer.as_deref(), Some(&b"still here"[..]));
    assert!(removing.try_wait().unwrap().is_none());
    drop((a, b, pd));
    let removed = within_deadline("the removal", || removing.try_wait().unwrap());
    assert!(removed.success() && !own.exists());
}

#[test]
fn a_removed_soft_device_fails_its_queue_pairs() {
    in_own_process("cm_unplug::a_removed_soft_device_fails_its_queue_pairs", || {
        let Some(rdma) = soft_device() else { return };
        let (events, pd) = (rdma.async_events().unwrap(), rdma.pd());
        let (mut a, mut b) = connected_endpoints(rdma.endpoint(&pd));
        b.receive(pd.allocate(64).unwrap()).unwrap();
        let cq = rdma.completion_queue(8).build().unwrap();
        let mut unused = pd.queue_pair(&cq, &cq).build().unwrap();
        soft::remove();
        soft::remove();
        assert_eq!(error_of(unused.init(&InitOptions::default())).errno(), Some(Errno(libc::EIO)));
        assert_eq!(events.wait(DEADLINE).unwrap().unwrap().event_type, AsyncEventType::DEVICE_FATAL);
        assert!(events.try_event().unwrap().is_none());
        assert_eq!(b.wait(DEADLINE).unwrap().status, WcStatus::WR_FLUSH_ERR);
        a.send(filled(&pd, b"into the void")).unwrap();
        assert_eq!(a.wait(DEADLINE).unwrap().status, WcStatus::WR_FLUSH_ERR);
        assert_eq!(error_of(rdma.endpoint(&pd).build()).errno(), Some(Errno(libc::EIO)));
        assert!(rdma_safe::devices().unwrap().is_empty());
        drop((a, b, unused, cq, pd, events, rdma));
        let left = soft::objects();
        assert_eq!((left.contexts, left.queue_pairs, left.memory_regions), (0, 0, 0), "{left:?}");
    });
}
