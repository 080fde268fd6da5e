//! Names of objects, which stand for them in events.

/// A name that no other object of the kind has in this process: a number, handed to the provider as the `…_context` of the
/// object, read back with an event, and never dereferenced.
macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub struct $name(u64);

        impl $name {
            pub(crate) fn next() -> Self {
                static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
                $name(NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
            }

            pub(crate) fn to_context(self) -> *mut std::ffi::c_void {
                std::ptr::without_provenance_mut(self.0 as usize)
            }

            pub(crate) fn from_context(context: *mut std::ffi::c_void) -> Self {
                $name(context.addr() as u64)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id! {
    /// Tells queue pairs apart in asynchronous events; never used twice in a process, while numbers of queue pairs are.
    QpId
}

id! {
    /// Tells completion queues apart in events; never used twice in a process.
    CqId
}

id! {
    /// Tells shared receive queues apart in asynchronous events; never used twice in a process.
    SrqId
}

id! {
    /// Tells work queues apart in asynchronous events; never used twice in a process.
    WqId
}

id! {
    /// Tells ids of librdmacm apart in events; never used twice in a process.
    CmId
}
