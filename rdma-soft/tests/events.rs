//! Events of objects that are destroyed while other threads wait for events.

use std::ptr::null_mut;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use rdma_soft::abi::*;
use rdma_sys::*;

/// A context with the objects that queue pairs need. All of them stay.
struct Device {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    cq: *mut ibv_cq,
    srq: *mut ibv_srq,
}

impl Device {
    fn open() -> Device {
        // SAFETY: each object is created from the previous ones, which stay.
        unsafe {
            let list = ibv_get_device_list(null_mut());
            let context = ibv_open_device(*list);
            assert!(!context.is_null());
            let pd = ibv_alloc_pd(context);
            let cq = ibv_create_cq(context, 16, null_mut(), null_mut(), 0);
            let attr = ibv_srq_attr { max_wr: 1, max_sge: 1, srq_limit: 0 };
            let srq = ibv_create_srq(pd, &mut ibv_srq_init_attr { srq_context: null_mut(), attr });
            assert!(!pd.is_null() && !cq.is_null() && !srq.is_null());
            Device { context, pd, cq, srq }
        }
    }

    /// Creates a queue pair with a pending event: last WQE reached.
    fn failed_qp(&self) -> *mut ibv_qp {
        let mut init = ibv_qp_init_attr {
            send_cq: self.cq,
            recv_cq: self.cq,
            srq: self.srq,
            qp_type: IBV_QPT_RC,
            ..ibv_qp_init_attr::zeroed()
        };
        // SAFETY: the objects stay longer than the queue pair.
        unsafe {
            let qp = ibv_create_qp(self.pd, &mut init);
            let mut attr = ibv_qp_attr { qp_state: IBV_QPS_INIT, port_num: 1, ..ibv_qp_attr::zeroed() };
            let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
            assert_eq!(ibv_modify_qp(qp, &mut attr, mask.0 as i32), 0);
            attr.qp_state = IBV_QPS_ERR;
            assert_eq!(ibv_modify_qp(qp, &mut attr, IBV_QP_STATE.0 as i32), 0);
            qp
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn objects_are_destroyed_while_another_thread_takes_their_events() {
    let device = Device::open();
    let context = device.context as usize;
    std::thread::spawn(move || {
        let mut event = ibv_async_event::zeroed();
        // SAFETY: the context stays, and each event is acknowledged once.
        while unsafe { ibv_get_async_event(context as *mut ibv_context, &mut event) } == 0 {
            assert_eq!(event.event_type, IBV_EVENT_QP_LAST_WQE_REACHED);
            // SAFETY: the event comes from `ibv_get_async_event` and is acknowledged once.
            unsafe { ibv_ack_async_event(&mut event) };
        }
    });
    let (alive, watch) = channel();
    let worker = device;
    let objects = [worker.pd as usize, worker.cq as usize, worker.srq as usize];
    std::thread::spawn(move || {
        let [pd, cq, srq] = objects;
        let device = Device { context: null_mut(), pd: pd as *mut _, cq: cq as *mut _, srq: srq as *mut _ };
        for turn in 0..20_000_u32 {
            let qp = device.failed_qp();
            // Vary the time between the event and the destruction.
            (0..turn % 64 * 16).for_each(|_| std::hint::spin_loop());
            // SAFETY: only the event refers to the queue pair, and the call waits for its acknowledgement.
            assert_eq!(unsafe { ibv_destroy_qp(qp) }, 0);
            if alive.send(()).is_err() {
                break;
            }
        }
    });
    loop {
        match watch.recv_timeout(Duration::from_secs(60)) {
            Ok(()) => {}
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => panic!("deadlock"),
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_nonblocking_descriptor_returns_eagain() {
    let device = Device::open();
    let mut event = ibv_async_event::zeroed();
    // SAFETY: the context stays, and its user may set flags of its descriptor.
    unsafe {
        libc::fcntl((*device.context).async_fd, libc::F_SETFL, libc::O_NONBLOCK);
        assert_eq!(ibv_get_async_event(device.context, &mut event), -1);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EAGAIN));
        let qp = device.failed_qp();
        assert_eq!(ibv_get_async_event(device.context, &mut event), 0);
        assert_eq!(event.element.qp, qp);
        ibv_ack_async_event(&mut event);
        assert_eq!(ibv_get_async_event(device.context, &mut event), -1);
        assert_eq!(ibv_destroy_qp(qp), 0);
    }
}
