//! Identifiers of objects, by which events name them.

/// Defines an identifier that is unique among the objects of one kind in this process. It is a number that the provider
/// gets as the `…_context` of the object and returns in events. It is never dereferenced.
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
    /// Identifies a queue pair in asynchronous events. Unlike queue pair numbers, it is never reused in a process.
    QpId
}

id! {
    /// Identifies a completion queue in events. It is never reused in a process.
    CqId
}

id! {
    /// Identifies a shared receive queue in asynchronous events. It is never reused in a process.
    SrqId
}

id! {
    /// Identifies a work queue in asynchronous events. It is never reused in a process.
    WqId
}

id! {
    /// Identifies a librdmacm id in events. It is never reused in a process.
    CmId
}
