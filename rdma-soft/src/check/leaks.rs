//! Objects that are never destroyed.

use std::backtrace::Backtrace;
use std::collections::BTreeMap;

use super::{Checker, Kind, LeakedObject, Report};

/// An object of the device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Object {
    QueuePair(u32),
    CompletionQueue(u32),
    CompletionChannel(u32),
    SharedReceiveQueue(u32),
    /// By its key.
    Region(u32),
    /// By its key without the tag, which changes with each binding.
    Window(u32),
    ProtectionDomain(u32),
    EventChannel(u32),
    /// An `rdma_cm_id`.
    Id(u32),
}

impl Object {
    /// Name of such objects in the plural.
    fn plural(self) -> &'static str {
        match self {
            Object::QueuePair(_) => "queue pairs",
            Object::CompletionQueue(_) => "completion queues",
            Object::CompletionChannel(_) => "completion channels",
            Object::SharedReceiveQueue(_) => "shared receive queues",
            Object::Region(_) => "memory regions",
            Object::Window(_) => "memory windows",
            Object::ProtectionDomain(_) => "protection domains",
            Object::EventChannel(_) => "event channels",
            Object::Id(_) => "ids",
        }
    }
}

/// An object that was left, with its description.
#[derive(Debug)]
pub(crate) struct Left {
    pub(crate) object: Object,
    pub(crate) description: String,
}

/// Where objects were created.
#[derive(Default)]
pub(super) struct Origins(BTreeMap<Object, Backtrace>);

/// Notes that an object was created.
pub(crate) fn created(object: Object) {
    super::with(|check| check.created(object));
}

/// Notes that an object was destroyed, whose number may be reused.
pub(crate) fn destroyed(object: Object) {
    super::with(|check| check.destroyed(object));
}

impl Checker {
    /// Records where an object is created, if [`Options::backtrace`](super::Options::backtrace) is set.
    pub(super) fn created(&mut self, object: Object) {
        if self.options.backtrace {
            self.origins.0.entry(object).or_insert_with(Backtrace::force_capture);
        }
    }

    pub(super) fn destroyed(&mut self, object: Object) {
        self.origins.0.remove(&object);
    }

    /// Reports objects that were not destroyed, and forgets them. Objects of one type follow each other in `left`.
    pub(crate) fn leaked(&mut self, left: Vec<Left>, when: &str) {
        if left.is_empty() {
            return;
        }
        let counts: Vec<String> = left
            .chunk_by(|a, b| a.object.plural() == b.object.plural())
            .map(|same| format!("{} {}", same.len(), same[0].object.plural()))
            .collect();
        let mut report = Report::new(Kind::Leaked, format!("{when}: {} not destroyed", counts.join(", ")));
        for (at, Left { object, description }) in left.into_iter().enumerate() {
            let origin = self.origins.0.remove(&object);
            if at < self.options.limit {
                let backtrace = origin.map(|backtrace| backtrace.to_string());
                report.objects.push(LeakedObject { description, backtrace });
            }
        }
        self.report(report);
    }
}
