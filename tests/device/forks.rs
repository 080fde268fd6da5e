//! A child of `fork(3)` drops what it has inherited, and its parent goes on.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rdma_safe::cm::{Connector, EventChannel, Id, PortSpace};
use rdma_safe::device::DeviceCapabilities;
use rdma_safe::fork::{self, ForkStatus};
use rdma_safe::mr::Pages;
use rdma_safe::mw::Type2;
use rdma_safe::{Access, Device, Endpoint, EndpointSet, Error, ProtectionDomain, ReceivePool, Work};

use crate::cm::address;
use crate::cm_connections::{connected as connected_by_address, listener};
use crate::owned::wait;
use crate::support::child::in_own_process;
use crate::support::interposer::interposed;
use crate::support::interposer::rig::{Count, endpoints};
use crate::support::lab::Mode;
use crate::support::{DEADLINE, Rdma, device, error_of, filled, pattern};

/// Runs `body` in a child that was forked from this process, and waits for its success.
#[track_caller]
pub(crate) fn in_a_fork(body: impl FnOnce()) {
    // SAFETY: the harness runs the test alone in this process. The other threads, of the device and of a watchdog,
    // hold no lock that `body` takes: dropping inherited objects calls neither the device nor the watchdog, and the C library
    // prepares its allocator for a fork.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "{}", std::io::Error::last_os_error());
    if child == 0 {
        // A child that hangs is killed by a signal, long after it would have ended.
        // SAFETY: the argument is a number.
        unsafe { libc::alarm(300) };
        let code = match catch_unwind(AssertUnwindSafe(body)) {
            Ok(()) => 7,
            Err(_) => 1,
        };
        let _ = std::io::stdout().flush();
        // SAFETY: the argument is a number. No destructor of the parent's objects runs.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: the child is this process's, and the status is valid for writes.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7, "the child: status {status:#x}");
}

#[track_caller]
fn assert_inherited<T: std::fmt::Debug>(rdma: &Rdma, result: Result<T, Error>) {
    let error = error_of(result);
    assert!(matches!(&error, Error::Inherited { object } if object == rdma.device_name()), "{error:?}");
    assert!(error.to_string().contains("before this process was forked"), "{error}");
}

/// Sends one message in each direction.
#[track_caller]
fn exchange(a: &mut Endpoint, b: &mut Endpoint, round: u64) {
    let pd = a.pd().clone();
    for (from, to) in [(0, 1), (1, 0)] {
        let ends = [&mut *a, &mut *b];
        let [sender, receiver] = if from < to {
            ends
        } else {
            let [a, b] = ends;
            [b, a]
        };
        let message = pattern(round, 3000);
        receiver.receive(pd.allocate(3000).unwrap()).unwrap();
        sender.send(filled(&pd, &message)).unwrap();
        assert!(wait(receiver).buffer.as_deref() == Some(&message[..]), "round {round}");
        let _ = wait(sender);
    }
}

/// Two members of a set with a pool, with the peers that they are connected to.
fn set(rdma: &Rdma, pd: &ProtectionDomain) -> (EndpointSet, ReceivePool, Vec<Endpoint>) {
    let mut pool = ReceivePool::new(pd, 8).unwrap();
    for buffer in pd.allocate(8 * 64).unwrap().into_chunks(64).unwrap() {
        pool.receive(buffer).unwrap();
    }
    let entries = pool.shared_receive_queue().max_wr() + 32;
    let mut set = EndpointSet::builder(pd.context(), entries).build().unwrap();
    let peers = (0..2).map(|_| {
        let builder = rdma.endpoint(pd).send_depth(4).recv_depth(4);
        let key = builder.clone().receive_pool(&pool).build_in(&mut set).unwrap();
        let mut peer = builder.build().unwrap();
        let mut member = set.endpoint(key).unwrap();
        member.connect(&peer.address()).unwrap();
        peer.connect(&member.address()).unwrap();
        peer
    });
    let peers = peers.collect();
    (set, pool, peers)
}

#[test]
fn a_child_that_drops_everything_leaves_its_parent_connected() {
    in_own_process("forks::a_child_that_drops_everything_leaves_its_parent_connected", || {
        let Some(rdma) = device() else { return };
        if fork::status().unwrap() == ForkStatus::DISABLED {
            println!("skipped: this kernel may move registered pages of the parent to the child");
            return;
        }
        for mode in Mode::ALL {
            println!("{mode}");
            let context = Device::by_name(rdma.device_name()).unwrap().open().unwrap();
            let pd = context.alloc_pd().unwrap();
            let (mut a, mut b) = endpoints(&rdma, &pd, mode);
            exchange(&mut a, &mut b, 1);
            // Work in flight: a receive, and a send that is not polled.
            a.receive(pd.allocate(64).unwrap()).unwrap();
            b.send(filled(&pd, b"in flight")).unwrap();
            let (mut set, pool, mut peers) = set(&rdma, &pd);
            let mut region = pd.expose(Pages::new(4096).unwrap(), Access::REMOTE | Access::MW_BIND).unwrap();
            let remote = region.remote();
            let buffer = pd.allocate(256).unwrap();
            let channel = context.create_channel().unwrap();
            let mut queue = context.completion_queue(4).channel(&channel).build().unwrap();
            queue.arm(false).unwrap();
            let pair = pd.queue_pair(&queue, &queue).build().unwrap();
            let windows = DeviceCapabilities::MEM_WINDOW_TYPE_2A | DeviceCapabilities::MEM_WINDOW_TYPE_2B;
            let has_windows = context.attributes().capabilities().intersects(windows);
            let window = has_windows.then(|| pd.memory_window::<Type2>().unwrap());

            // The child moves out of its copies only.
            let everything = || {
                // SAFETY: each value is read once, in the child, which ends before the originals are dropped there.
                unsafe {
                    use std::ptr::read;
                    let ends = (read(&a), read(&b), read(&set), read(&pool), read(&peers));
                    let memory = (read(&region), read(&buffer), read(&window));
                    (read(&context), read(&pd), ends, memory, read(&channel), read(&queue), read(&pair))
                }
            };
            in_a_fork(|| {
                let (context, pd, (mut a, b, set, pool, peers), (region, buffer, window), channel, queue, pair) =
                    everything();
                assert_inherited(&rdma, context.alloc_pd());
                assert_inherited(&rdma, context.create_channel());
                assert_inherited(&rdma, context.completion_queue(1).build());
                assert_inherited(&rdma, pd.allocate(64));
                assert_inherited(&rdma, pd.expose(Pages::new(64).unwrap(), Access::REMOTE));
                assert_inherited(&rdma, pd.queue_pair(&queue, &queue).build());
                assert_inherited(&rdma, Endpoint::builder(&pd).build());
                if let Some(window) = window {
                    assert_inherited(&rdma, pd.memory_window::<Type2>());
                    assert_inherited(&rdma, window.deallocate());
                }
                let address = a.address();
                assert_inherited(&rdma, a.connect(&address));
                assert_inherited(&rdma, a.close());
                assert_inherited(&rdma, pair.destroy());
                drop((context, buffer, region, b, peers, set, pool, queue, channel, pd));
            });

            // The parent's connections, memory and pool are as before.
            assert_eq!(wait(&mut a).buffer.as_deref(), Some(&b"in flight"[..]));
            let _ = wait(&mut b);
            exchange(&mut a, &mut b, 2);
            region.write(0, b"of the parent").unwrap();
            b.read(pd.allocate(13).unwrap(), remote.slice(0, 13).unwrap()).unwrap();
            assert_eq!(wait(&mut b).buffer.as_deref(), Some(&b"of the parent"[..]));
            for peer in &mut peers {
                peer.post(Work::send(filled(&pd, b"to the pool"))).unwrap();
                let (_, done) = set.wait(DEADLINE).unwrap();
                assert_eq!(done.ok().unwrap().buffer.as_deref(), Some(&b"to the pool"[..]));
                let _ = wait(peer);
            }
            // The process forks again, after it has exchanged messages.
            in_a_fork(|| assert_inherited(&rdma, pd.allocate(64)));
            exchange(&mut a, &mut b, 3);
            if let Some(window) = window {
                window.deallocate().unwrap();
            }
            pair.destroy().unwrap();
            assert!(a.close().unwrap().is_empty() && b.close().unwrap().is_empty());
            drop((set, pool, peers, region, buffer, queue, channel, pd, context));
        }
    });
}

#[test]
fn a_child_calls_no_function_of_the_provider_and_frees_no_registered_memory() {
    in_own_process("forks::a_child_calls_no_function_of_the_provider_and_frees_no_registered_memory", || {
        let Some(soft) = interposed() else { return };
        const VERBS: [&str; 14] = [
            "dealloc_mw",
            "end_poll",
            "ibv_close_device",
            "ibv_dealloc_pd",
            "ibv_dereg_mr",
            "ibv_destroy_comp_channel",
            "ibv_destroy_cq",
            "ibv_destroy_qp",
            "ibv_destroy_srq",
            "ibv_modify_qp",
            "ibv_poll_cq",
            "ibv_req_notify_cq",
            "start_poll",
            "wr_abort",
        ];
        let calls = || VERBS.map(|verb| soft.calls(verb));
        for mode in Mode::ALL {
            let pd = soft.pd_of_own_context();
            let count = Count::default();
            let (mut a, b) = endpoints(&soft, &pd, mode);
            a.receive(count.buffer(&pd)).unwrap();
            let exposed = pd.expose(count.memory(), Access::REMOTE).unwrap();
            let parts = count.buffer(&pd).into_chunks(16).unwrap();
            let (set, pool, peers) = set(&soft, &pd);
            // A forgotten batch, which the endpoint would abort.
            let mut batch = a.batch().unwrap();
            batch.add(Work::send(count.buffer(&pd))).unwrap();
            std::mem::forget(batch);
            let before = calls();
            let count_before = count.freed();
            in_a_fork(|| {
                // SAFETY: as in the other test.
                unsafe {
                    use std::ptr::read;
                    drop((read(&parts), read(&exposed), read(&set), read(&pool), read(&peers)));
                    drop((read(&a), read(&b), read(&pd)));
                }
                assert_eq!((calls(), count.freed()), (before, count_before), "{mode}");
            });
            drop((parts, exposed, set, pool, peers, a, b, pd));
            assert_eq!(count.freed(), 4, "the parent frees its memory");
        }
    });
}

#[test]
fn a_child_that_drops_connections_by_address_leaves_them_to_its_parent() {
    in_own_process("forks::a_child_that_drops_connections_by_address_leaves_them_to_its_parent", || {
        let Some(rdma) = device() else { return };
        let Some(address) = address(&rdma) else { return };
        let (mut listener, _) = listener(address);
        let (mut a, mut b) = connected_by_address(&Connector::new(), &mut listener);
        let channel = EventChannel::new().unwrap();
        let mut id = Id::new(&channel, PortSpace::TCP).unwrap();
        in_a_fork(|| {
            // SAFETY: as in the first test.
            let (a, b, listener, channel, id) = unsafe {
                use std::ptr::read;
                (read(&a), read(&b), read(&listener), read(&channel), read(&id))
            };
            for error in [error_of(channel.try_event()), error_of(Id::new(&channel, PortSpace::TCP))] {
                assert!(matches!(&error, Error::Inherited { object } if object == "rdma_cm"), "{error:?}");
            }
            let error = error_of(id.destroy());
            assert!(matches!(error, Error::Inherited { .. }), "{error:?}");
            drop((a, b, listener, channel));
        });
        let message = pattern(1, 4096);
        let outbox = filled(a.pd(), &message);
        a.send(outbox).unwrap();
        let done = b.wait(DEADLINE).unwrap().ok().unwrap();
        assert_eq!(done.buffer.as_deref(), Some(&message[..]));
        let _ = a.wait(DEADLINE).unwrap().ok().unwrap();
        assert!(a.is_connected().unwrap() && b.is_connected().unwrap());
        drop((a, b));
        let (a, b) = connected_by_address(&Connector::new(), &mut listener);
        drop((a, b));
        id.bind((address, 0)).unwrap();
        id.destroy().unwrap();
    });
}
