//! Memory windows of endpoints: rights and keys of single connections.

use rdma_safe::device::{DeviceCapabilities, Quirks};
use rdma_safe::endpoint::BoundWindow;
use rdma_safe::mr::Pages;
use rdma_safe::{
    Access, Endpoint, EndpointBuilder, EndpointSet, Error, ExposedRegion, Operation, PostError, ProtectionDomain,
    QueuePairState, RemoteMemory, WcStatus, Work,
};

use crate::owned::wait;
use crate::support::child::{expect_kernel_objects, in_own_process};
use crate::support::interposer::rig::{Count, endpoints, on_each_mode};
use crate::support::lab::Mode;
use crate::support::{DEADLINE, Rdma, device, error_of, filled, within_deadline};

const RIGHTS: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// Runs `body` on every combination of interfaces, if the device has windows of type 2.
fn with_windows(body: impl Fn(&Rdma, &ProtectionDomain, EndpointBuilder<'_>)) {
    let Some(rdma) = device() else { return };
    let any = DeviceCapabilities::MEM_WINDOW_TYPE_2A | DeviceCapabilities::MEM_WINDOW_TYPE_2B;
    for mode in Mode::each() {
        println!("{mode}");
        let pd = rdma.pd();
        let builder = rdma.endpoint(&pd).peer_access(RIGHTS);
        let builder = builder.classic_post(mode.classic_qp).classic_poll(mode.classic_cq);
        if rdma.attributes().capabilities().intersects(any) {
            body(&rdma, &pd, builder);
            continue;
        }
        let (mut owner, _peer) = pair(&builder);
        let region = region(&pd);
        let error = error_of(owner.bind_window(region.bind_info(0, 8, RIGHTS).unwrap()));
        assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    }
}

/// Whether the device does not report keys that a peer has invalidated, so that the window stays bound here.
///
/// The kernel's rxe sets its own flag, which means a verified checksum in the verbs API.
fn hides_invalidations(rdma: &Rdma) -> bool {
    if rdma.is_rxe() {
        println!("skipped: rxe does not report keys that a peer has invalidated");
    }
    rdma.is_rxe()
}

fn pair(builder: &EndpointBuilder<'_>) -> (Endpoint, Endpoint) {
    let (mut owner, mut peer) = (builder.clone().build().unwrap(), builder.clone().build().unwrap());
    owner.connect(&peer.address()).unwrap();
    peer.connect(&owner.address()).unwrap();
    (owner, peer)
}

fn region(pd: &ProtectionDomain) -> ExposedRegion {
    let mut region = pd.expose(Pages::new(8192).unwrap(), Access::MW_BIND).unwrap();
    region.write(0, &[b'.'; 8192]).unwrap();
    region
}

fn bytes<const N: usize>(region: &ExposedRegion, offset: usize) -> [u8; N] {
    let mut bytes = [0; N];
    region.read(offset, &mut bytes).unwrap();
    bytes
}

#[track_caller]
fn bind(owner: &mut Endpoint, region: &ExposedRegion, offset: usize, len: usize, access: Access) -> BoundWindow {
    let window = owner.bind_window(region.bind_info(offset, len, access).unwrap()).unwrap();
    let done = wait(owner);
    assert_eq!((done.operation, done.id, done.buffer.is_none()), (Operation::BindWindow, window.work_id(), true));
    assert!(owner.is_window_bound(&window));
    window
}

#[track_caller]
fn invalidate(owner: &mut Endpoint, window: BoundWindow) {
    let id = owner.invalidate_window(window).unwrap();
    let done = wait(owner);
    assert_eq!((done.operation, done.id, done.buffer.is_none()), (Operation::InvalidateWindow, id, true));
}

/// Status of a write of the peer.
fn write(peer: &mut Endpoint, text: &[u8], remote: RemoteMemory) -> WcStatus {
    let buffer = filled(peer.pd(), text);
    let id = peer.write(buffer, remote).unwrap();
    let done = peer.wait(DEADLINE).unwrap();
    assert_eq!((done.id, done.operation), (id, Operation::Write));
    done.status
}

fn read(peer: &mut Endpoint, remote: RemoteMemory) -> Result<Vec<u8>, WcStatus> {
    let buffer = peer.pd().allocate(remote.len as usize).unwrap();
    peer.read(buffer, remote).unwrap();
    let done = peer.wait(DEADLINE).unwrap();
    if done.status == WcStatus::SUCCESS { Ok(done.buffer.unwrap().to_vec()) } else { Err(done.status) }
}

#[test]
fn a_peer_reads_and_writes_within_its_window_until_it_is_invalidated() {
    with_windows(|_, pd, builder| {
        let (mut owner, mut peer) = pair(&builder);
        let region = region(pd);
        let mut keys = Vec::new();
        // The second and third binding use the window of the first.
        for (offset, text) in [(0, b"zero"), (4094, b"over"), (64, b"next")] {
            let window = bind(&mut owner, &region, offset, 4, RIGHTS);
            let remote = window.remote();
            assert_eq!((remote.address, remote.len), (region.remote().address + offset as u64, 4));
            assert_eq!(write(&mut peer, text, remote), WcStatus::SUCCESS);
            assert_eq!(&bytes::<4>(&region, offset), text);
            assert_eq!(read(&mut peer, remote).unwrap(), text);
            invalidate(&mut owner, window);
            keys.push(remote.rkey);
        }
        assert!(keys[0] != keys[1] && keys[1] != keys[2] && keys[0] != keys[2], "each binding has a new key: {keys:?}");
        assert!(keys.iter().all(|key| key >> 8 == keys[0] >> 8), "one window: {keys:?}");
        let remote = RemoteMemory { address: region.remote().address + 64, len: 4, rkey: keys[2] };
        assert_eq!(write(&mut peer, b"late", remote), WcStatus::REM_ACCESS_ERR);
        assert_eq!(&bytes::<4>(&region, 64), b"next");
    });
}

#[test]
fn access_beyond_the_rights_or_the_range_of_a_window_fails() {
    with_windows(|rdma, pd, builder| {
        let (mut owner, mut peer) = pair(&builder);
        let region = region(pd);
        let window = bind(&mut owner, &region, 0, 8, Access::REMOTE_READ);
        assert_eq!(read(&mut peer, window.remote()).unwrap(), b"........");
        assert_eq!(write(&mut peer, b"more", window.remote()), WcStatus::REM_ACCESS_ERR);

        let (mut owner, mut peer) = pair(&builder);
        let window = bind(&mut owner, &region, 0, 8, Access::REMOTE_WRITE);
        assert_eq!(read(&mut peer, window.remote()), Err(WcStatus::REM_ACCESS_ERR));

        let (mut owner, mut peer) = pair(&builder);
        let window = bind(&mut owner, &region, 16, 4, RIGHTS);
        assert_eq!(write(&mut peer, b"four", window.remote()), WcStatus::SUCCESS);
        // The type checks the range that the owner has told; a peer that ignores it is stopped by the device.
        let beyond = RemoteMemory { address: window.remote().address + 2, ..window.remote() };
        let (status, found) = if rdma.quirks().contains(Quirks::WINDOWS_COVER_WHOLE_REGIONS) {
            (WcStatus::SUCCESS, b"fopast")
        } else {
            (WcStatus::REM_ACCESS_ERR, b"four..")
        };
        assert_eq!(write(&mut peer, b"past", beyond), status);
        assert_eq!(&bytes::<6>(&region, 16), found);
    });
}

#[test]
fn revoking_one_of_four_clients_leaves_the_others_their_access() {
    with_windows(|_, pd, builder| {
        let region = region(pd);
        let mut clients: Vec<_> = (0..4).map(|_| pair(&builder)).collect();
        let mut windows: Vec<_> = clients
            .iter_mut()
            .enumerate()
            .map(|(client, (owner, _))| bind(owner, &region, client * 1024, 1024, RIGHTS))
            .collect();
        // The key belongs to one connection.
        let revoked = windows.remove(1);
        let rejected = error_of(clients[0].0.invalidate_window(revoked));
        assert_eq!(rejected.error, PostError::ForeignWindow);
        assert!(!clients[0].0.is_window_bound(&rejected.window));
        let remote = rejected.window.remote();
        assert_eq!(write(&mut clients[1].1, b"mine", remote), WcStatus::SUCCESS);
        invalidate(&mut clients[1].0, rejected.window);
        assert_eq!(write(&mut clients[1].1, b"late", remote), WcStatus::REM_ACCESS_ERR);
        assert_eq!(&bytes::<4>(&region, 1024), b"mine");
        // Another client cannot use a window by its key.
        let stolen = windows[0].remote();
        assert_eq!(write(&mut clients[3].1, b"take", stolen), WcStatus::REM_ACCESS_ERR);
        assert_eq!(&bytes::<4>(&region, 0), b"....");
        for (client, window) in [(0, &windows[0]), (2, &windows[1])] {
            let text = [b'0' + client as u8; 4];
            assert_eq!(write(&mut clients[client].1, &text, window.remote()), WcStatus::SUCCESS);
            assert_eq!(bytes::<4>(&region, client * 1024), text);
            assert!(clients[client].0.is_window_bound(window));
        }
    });
}

#[test]
fn a_send_of_the_peer_with_the_key_releases_the_window() {
    with_windows(|rdma, pd, builder| {
        if hides_invalidations(rdma) {
            return;
        }
        let (mut owner, mut peer) = pair(&builder);
        let region = region(pd);
        for round in 0..3 {
            owner.receive(pd.allocate(8).unwrap()).unwrap();
            let window = bind(&mut owner, &region, 0, 4, RIGHTS);
            let remote = window.remote();
            assert_eq!(write(&mut peer, &[round; 4], remote), WcStatus::SUCCESS);
            peer.post(Work::send_invalidate(filled(pd, b"done"), remote.rkey)).unwrap();
            let message = wait(&mut owner);
            assert_eq!((message.operation, message.invalidated_rkey()), (Operation::Receive, Some(remote.rkey)));
            assert_eq!(message.buffer.as_deref(), Some(&b"done"[..]));
            let _ = wait(&mut peer);
            assert!(!owner.is_window_bound(&window));
            let rejected = error_of(owner.invalidate_window(window));
            assert_eq!(rejected.error, PostError::NotBound);
            if round == 2 {
                assert_eq!(write(&mut peer, b"late", remote), WcStatus::REM_ACCESS_ERR);
                assert_eq!(bytes::<4>(&region, 0), [round; 4]);
            }
        }
    });
}

#[test]
fn a_binding_takes_the_room_of_a_send_and_completes_in_order() {
    with_windows(|_, pd, builder| {
        let (mut owner, mut peer) = pair(&builder.clone().send_depth(4));
        let region = region(pd);
        for _ in 0..2 {
            peer.receive(pd.allocate(64).unwrap()).unwrap();
        }
        let first = owner.post(Work::send(filled(pd, b"first")).unsignaled()).unwrap();
        let window = owner.bind_window(region.bind_info(0, 4, RIGHTS).unwrap()).unwrap();
        let key = window.remote().rkey.to_be_bytes();
        // The message with the key follows the binding, although the binding has not completed.
        let last = owner.send(filled(pd, &key)).unwrap();
        let remote = window.remote();
        let bound = window.work_id();
        assert_eq!(wait(&mut peer).buffer.as_deref(), Some(&b"first"[..]));
        assert_eq!(wait(&mut peer).buffer.as_deref(), Some(&key[..]));
        assert_eq!(write(&mut peer, b"used", remote), WcStatus::SUCCESS);
        let invalidated = owner.invalidate_window(window).unwrap();
        let error = error_of(owner.bind_window(region.bind_info(8, 4, RIGHTS).unwrap()));
        assert!(matches!(error, Error::Post(PostError::EndpointFull { send_depth: 4, .. })), "{error:?}");
        let order = [
            (first, Operation::Send),
            (bound, Operation::BindWindow),
            (last, Operation::Send),
            (invalidated, Operation::InvalidateWindow),
        ];
        for expected in order {
            let done = wait(&mut owner);
            assert_eq!((done.id, done.operation), expected);
        }
        assert_eq!(write(&mut peer, b"late", remote), WcStatus::REM_ACCESS_ERR);
        assert_eq!(&bytes::<4>(&region, 0), b"used");
    });
}

#[test]
fn a_window_keeps_its_region_until_it_is_released_or_the_endpoint_is_closed() {
    in_own_process(
        "endpoint_windows::a_window_keeps_its_region_until_it_is_released_or_the_endpoint_is_closed",
        || {
            with_windows(|_, pd, builder| {
                let (mut owner, mut peer) = pair(&builder);
                let first = region(pd);
                let window = bind(&mut owner, &first, 0, 4, RIGHTS);
                drop(first);
                expect_kernel_objects("mr", 1);
                let id = owner.invalidate_window(window).unwrap();
                let done = wait(&mut owner);
                assert_eq!((done.id, done.status), (id, WcStatus::SUCCESS));
                expect_kernel_objects("mr", 0);

                let second = region(pd);
                let window = bind(&mut owner, &second, 0, 4, RIGHTS);
                drop(second);
                assert_eq!(write(&mut peer, b"kept", window.remote()), WcStatus::SUCCESS);
                // A forgotten window ends with its endpoint.
                let remote = window.remote();
                drop(window);
                assert_eq!(read(&mut peer, remote).unwrap(), b"kept");
                expect_kernel_objects("mr", 1);
                expect_kernel_objects("qp", 2);
                assert!(owner.close().unwrap().is_empty());
                expect_kernel_objects("mr", 0);
                expect_kernel_objects("qp", 1);
            });
        },
    );
}

#[test]
fn members_of_a_set_bind_invalidate_and_release_windows() {
    with_windows(|rdma, pd, builder| {
        let mut set = EndpointSet::builder(pd.context(), 64).build().unwrap();
        let region = region(pd);
        let mut members = Vec::new();
        for client in 0..4 {
            let key = builder.clone().send_depth(4).recv_depth(4).build_in(&mut set).unwrap();
            let mut peer = builder.clone().build().unwrap();
            let mut member = set.endpoint(key).unwrap();
            member.connect(&peer.address()).unwrap();
            peer.connect(&member.address()).unwrap();
            member.receive(pd.allocate(8).unwrap()).unwrap();
            let window = member.bind_window(region.bind_info(client * 64, 64, RIGHTS).unwrap()).unwrap();
            let (from, done) = set.wait(DEADLINE).unwrap();
            assert_eq!((from, done.id, done.operation), (key, window.work_id(), Operation::BindWindow));
            assert_eq!(done.status, WcStatus::SUCCESS);
            members.push((key, peer, window));
        }
        for (client, (_, peer, window)) in members.iter_mut().enumerate() {
            assert_eq!(write(peer, &[b'0' + client as u8; 4], window.remote()), WcStatus::SUCCESS);
        }
        // The first client is revoked, and the second is removed.
        let (key, mut revoked, window) = members.remove(0);
        let remote = window.remote();
        let id = set.endpoint(key).unwrap().invalidate_window(window).unwrap();
        let (from, done) = set.wait(DEADLINE).unwrap();
        assert_eq!((from, done.id, done.operation), (key, id, Operation::InvalidateWindow));
        assert_eq!(write(&mut revoked, b"late", remote), WcStatus::REM_ACCESS_ERR);
        let (key, _removed, window) = members.remove(0);
        assert_eq!(set.remove(key).unwrap().len(), 1, "the receive");
        assert!(set.endpoint(key).is_none());
        let rejected = error_of(set.endpoint(members[0].0).unwrap().invalidate_window(window));
        assert_eq!(rejected.error, PostError::ForeignWindow);
        if hides_invalidations(rdma) {
            return;
        }
        // The third client releases its own.
        let (key, _peer, window) = &members[0];
        assert!(set.endpoint(*key).unwrap().is_window_bound(window));
        let (key, mut peer, window) = members.remove(0);
        peer.post(Work::send_invalidate(filled(pd, b"done"), window.remote().rkey)).unwrap();
        loop {
            // The connection of the first client has failed, which its receive reports.
            let (from, done) = set.wait(DEADLINE).unwrap();
            if from == key {
                assert_eq!(done.invalidated_rkey(), Some(window.remote().rkey));
                break;
            }
        }
        let _ = wait(&mut peer);
        let member = set.endpoint(key).unwrap();
        assert!(!member.is_window_bound(&window));
        let (_, peer, window) = &mut members[0];
        assert_eq!(write(peer, b"last", window.remote()), WcStatus::SUCCESS);
        assert_eq!(bytes::<4>(&region, 192), *b"last");
        assert_eq!(bytes::<4>(&region, 0), *b"0000");
    });
}

#[test]
fn a_member_of_a_set_releases_the_window_that_its_peer_has_bound() {
    with_windows(|rdma, pd, builder| {
        if hides_invalidations(rdma) {
            return;
        }
        let mut set = EndpointSet::builder(pd.context(), 64).build().unwrap();
        let region = region(pd);
        let mut owner = builder.clone().build().unwrap();
        let key = builder.clone().send_depth(4).recv_depth(4).build_in(&mut set).unwrap();
        let mut member = set.endpoint(key).unwrap();
        member.connect(&owner.address()).unwrap();
        owner.connect(&member.address()).unwrap();
        owner.receive(pd.allocate(8).unwrap()).unwrap();
        let window = bind(&mut owner, &region, 0, 64, RIGHTS);
        let rkey = window.remote().rkey;
        set.endpoint(key).unwrap().post(Work::send_invalidate(filled(pd, b"done"), rkey)).unwrap();
        assert_eq!(wait(&mut owner).invalidated_rkey(), Some(rkey));
        assert_eq!(set.wait(DEADLINE).unwrap().1.status, WcStatus::SUCCESS);
        assert!(!owner.is_window_bound(&window));
    });
}

#[test]
fn windows_of_an_unconnected_endpoint_and_of_another_domain_are_rejected() {
    with_windows(|rdma, pd, builder| {
        let region = region(pd);
        let info = region.bind_info(0, 4, RIGHTS).unwrap();
        let mut unconnected = builder.clone().build().unwrap();
        let error = error_of(unconnected.bind_window(info));
        assert!(matches!(error, Error::Post(PostError::NotReady { .. })), "{error:?}");
        assert_eq!(unconnected.sends_in_flight(), 0);

        let (mut owner, mut peer) = pair(&builder);
        let foreign = rdma.pd().expose(Pages::new(4096).unwrap(), Access::MW_BIND).unwrap();
        let error = error_of(owner.bind_window(foreign.bind_info(0, 4, RIGHTS).unwrap()));
        assert!(matches!(error, Error::Post(PostError::ForeignDomain { object: "memory region" })), "{error:?}");
        assert_eq!(owner.sends_in_flight(), 0);
        let window = bind(&mut owner, &region, 0, 4, RIGHTS);
        assert_eq!(write(&mut peer, b"good", window.remote()), WcStatus::SUCCESS);
        let beyond = RemoteMemory { rkey: window.remote().rkey ^ 0xff, ..window.remote() };
        assert_eq!(write(&mut peer, b"fail", beyond), WcStatus::REM_ACCESS_ERR);
    });
}

#[test]
fn a_refused_binding_opens_nothing_and_leaves_the_endpoint_usable() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd_of_own_context();
        let (mut owner, mut peer) = endpoints(soft, &pd, mode);
        let region = region(&pd);
        let info = region.bind_info(0, 4, RIGHTS).unwrap();
        soft.refuse_send(mode);
        let error = error_of(owner.bind_window(info));
        assert!(matches!(error, Error::Post(PostError::QueueFull { posted: 0 })), "{error:?}");
        assert_eq!(owner.sends_in_flight(), 0);
        let window = bind(&mut owner, &region, 0, 4, RIGHTS);
        assert_eq!(soft.calls("alloc_mw"), 1, "the window of the refused binding is used");
        assert_eq!(write(&mut peer, b"used", window.remote()), WcStatus::SUCCESS);

        soft.refuse_send(mode);
        let rejected = error_of(owner.invalidate_window(window));
        assert_eq!(rejected.error, PostError::QueueFull { posted: 0 });
        assert!(owner.is_window_bound(&rejected.window));
        assert_eq!(write(&mut peer, b"more", rejected.window.remote()), WcStatus::SUCCESS);
        invalidate(&mut owner, rejected.window);
    });
}

#[test]
fn a_binding_with_an_unknown_result_ends_the_endpoint_and_keeps_the_region() {
    for taken in [false, true] {
        on_each_mode(|soft, mode| {
            let pd = soft.pd_of_own_context();
            let (mut owner, _peer) = endpoints(soft, &pd, mode);
            let count = Count::default();
            let region = pd.expose(count.memory(), Access::MW_BIND).unwrap();
            soft.doubt_send(mode, taken);
            let error = error_of(owner.bind_window(region.bind_info(0, 4, RIGHTS).unwrap()));
            assert!(matches!(error, Error::Post(PostError::MaybePosted { .. })), "{error:?}");
            drop(region);
            assert_eq!(count.freed(), 0, "the window may be bound to it");
            let again = pd.expose(count.memory(), Access::MW_BIND).unwrap();
            let error = error_of(owner.bind_window(again.bind_info(0, 4, RIGHTS).unwrap()));
            assert!(matches!(error, Error::Post(PostError::EndpointFailed)), "{error:?}");
            drop(again);
            assert_eq!(count.freed(), 1, "nothing was bound to it");
            drop(owner);
            assert_eq!(count.freed(), 2);
        });
    }
}

#[test]
fn failed_work_on_a_window_keeps_its_region_until_the_endpoint_is_dropped() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd_of_own_context();
        let (mut owner, mut peer) = endpoints(soft, &pd, mode);
        let count = Count::default();
        let region = pd.expose(count.memory(), Access::MW_BIND).unwrap();
        let window = bind(&mut owner, &region, 0, 4, RIGHTS);
        drop(region);
        // A write with a wrong key ends the connection, which flushes the invalidation.
        let wrong = RemoteMemory { rkey: window.remote().rkey ^ 0xff, ..window.remote() };
        assert_eq!(write(&mut peer, b"fail", wrong), WcStatus::REM_ACCESS_ERR);
        let failed = || owner.queue_pair().query().unwrap().state() == Some(QueuePairState::ERR);
        within_deadline("the error of the owner", || failed().then_some(()));
        let id = owner.invalidate_window(window).unwrap();
        let done = owner.wait(DEADLINE).unwrap();
        let expected = (id, Operation::InvalidateWindow, WcStatus::WR_FLUSH_ERR);
        assert_eq!((done.id, done.operation, done.status), expected);
        assert_eq!(count.freed(), 0, "the window may be bound");
        drop(owner);
        assert_eq!(count.freed(), 1);
    });
}
