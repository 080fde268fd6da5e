//! Asynchronous events. Each must be acknowledged once, before its object is destroyed.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_int;

use rdma_sys::*;

use super::state::{Ptr, State, enter, set_errno};

/// The object of an event.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Element {
    Qp(*mut ibv_qp),
    Cq(*mut ibv_cq),
    Srq(*mut ibv_srq),
    Wq(*mut ibv_wq),
    /// A port number, or the number in an unknown event.
    Number(c_int),
}

struct Queued {
    kind: u32,
    element: Raw,
}

/// The representation in libibverbs: the union member, and the object to acknowledge.
#[derive(Clone, Copy)]
enum Raw {
    Object(usize, Ptr<u8>),
    Number(c_int),
}

/// The event queue of a context.
pub(super) struct AsyncQueue {
    /// Both ends of a pipe, which holds one byte for each event.
    fds: [c_int; 2],
    events: VecDeque<Queued>,
}

impl AsyncQueue {
    /// Returns `None` if no descriptor is available.
    pub(super) fn new() -> Option<Self> {
        let mut fds = [-1; 2];
        let opened = unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) } == 0;
        opened.then(|| AsyncQueue { fds, events: VecDeque::new() })
    }

    pub(super) fn fd(&self) -> c_int {
        self.fds[0]
    }

    fn push(&mut self, event: Queued) {
        self.events.push_back(event);
        assert_eq!(unsafe { libc::write(self.fds[1], [1_u8].as_ptr().cast(), 1) }, 1);
    }

    fn take_byte(&self) -> bool {
        let mut byte = 0_u8;
        unsafe { libc::read(self.fds[0], (&raw mut byte).cast(), 1) == 1 }
    }
}

impl Drop for AsyncQueue {
    fn drop(&mut self) {
        for fd in self.fds.into_iter().filter(|fd| *fd >= 0) {
            unsafe { libc::close(fd) };
        }
    }
}

/// Events that were read but not acknowledged, by object.
#[derive(Default)]
pub(super) struct AsyncEvents {
    unacknowledged: BTreeMap<usize, u32>,
}

impl State {
    /// Queues an event of any kind, even if the kind does not fit the object.
    pub(super) fn raise(&mut self, context: *mut ibv_context, kind: u32, element: Element) {
        let object = |pointer: *mut u8| Raw::Object(pointer.addr(), Ptr(pointer));
        let element = match element {
            Element::Qp(qp) => object(qp.cast()),
            Element::Cq(cq) => object(cq.cast()),
            Element::Srq(srq) => object(srq.cast()),
            Element::Wq(wq) => object(wq.cast()),
            Element::Number(number) => Raw::Number(number),
        };
        let queue = self.contexts.get_mut(&context.addr()).and_then(|context| context.events.as_mut());
        queue.expect("a context with events").push(Queued { kind, element });
    }

    /// Queues an event of an object, if the device reports events.
    pub(super) fn raise_object(&mut self, context: usize, kind: ibv_event_type, object: *mut u8) {
        let queue = self.contexts.get_mut(&context).and_then(|context| context.events.as_mut());
        if let Some(queue) = queue {
            queue.push(Queued { kind: kind.0, element: Raw::Object(object.addr(), Ptr(object)) });
        }
    }

    /// Called before an object is destroyed: reports unacknowledged events and drops unread ones.
    pub(super) fn end_events(&mut self, address: usize, verb: &str) {
        if let Some(left) = self.async_events.unacknowledged.get(&address).copied().filter(|left| *left > 0) {
            self.violation(format!("deadlock: {verb} waits for {left} asynchronous events"));
        }
        for queue in self.contexts.values_mut().filter_map(|context| context.events.as_mut()) {
            let before = queue.events.len();
            queue.events.retain(|event| !matches!(event.element, Raw::Object(of, _) if of == address));
            for _ in queue.events.len()..before {
                queue.take_byte();
            }
        }
    }

    /// Closes the writing end of the pipe.
    pub(super) fn hang_up(&mut self, context: *mut ibv_context) {
        let context = self.contexts.get_mut(&context.addr()).expect("a context that exists");
        if let Some(queue) = &mut context.events {
            unsafe { libc::close(queue.fds[1]) };
            queue.fds[1] = -1;
        }
    }

    /// Events that were read but not acknowledged.
    pub(super) fn unacknowledged(&self) -> u32 {
        self.async_events.unacknowledged.values().sum()
    }
}

pub(super) unsafe extern "C" fn get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    enter(context, "ibv_get_async_event", |state, _| {
        if let Some(errno) = state.fault_once("ibv_get_async_event") {
            set_errno(errno);
            return -1;
        }
        let Some(found) = state.context(context.addr(), "ibv_get_async_event") else { return -1 };
        let Some(queue) = found.events.as_mut() else {
            set_errno(libc::EBADF);
            return -1;
        };
        if !queue.take_byte() {
            set_errno(std::io::Error::last_os_error().raw_os_error().unwrap_or(0));
            return -1;
        }
        let Queued { kind, element } = queue.events.pop_front().unwrap();
        // As in libibverbs, only the union member of this event type is written.
        unsafe {
            (*event).event_type = ibv_event_type(kind);
            match element {
                Raw::Object(address, pointer) => {
                    (*event).element.qp = pointer.0.cast();
                    *state.async_events.unacknowledged.entry(address).or_insert(0) += 1;
                }
                Raw::Number(number) => (*event).element.port_num = number,
            }
        }
        0
    })
}

pub(super) unsafe extern "C" fn ack_async_event(event: *mut ibv_async_event) {
    let kind = unsafe { (*event).event_type };
    let is_object = matches!(
        kind,
        IBV_EVENT_CQ_ERR
            | IBV_EVENT_QP_FATAL
            | IBV_EVENT_QP_REQ_ERR
            | IBV_EVENT_QP_ACCESS_ERR
            | IBV_EVENT_COMM_EST
            | IBV_EVENT_SQ_DRAINED
            | IBV_EVENT_PATH_MIG
            | IBV_EVENT_PATH_MIG_ERR
            | IBV_EVENT_QP_LAST_WQE_REACHED
            | IBV_EVENT_SRQ_ERR
            | IBV_EVENT_SRQ_LIMIT_REACHED
            | IBV_EVENT_WQ_FATAL
    );
    if !is_object {
        // Without an object the device is unknown. libibverbs does nothing here, either.
        return;
    }
    let object = unsafe { (*event).element.qp };
    enter(object, "ibv_ack_async_event", |state, _| match state.async_events.unacknowledged.get_mut(&object.addr()) {
        Some(left) if *left > 0 => *left -= 1,
        _ => state.violation("an asynchronous event is acknowledged that was not read"),
    });
}
