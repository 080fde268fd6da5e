//! Contexts, domains and regions that processes import from each other. Here each context stands for a process.

use std::any::Any;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rdma_safe::error::Verb;
use rdma_safe::mr::{ImportedRegion, Pages};
use rdma_safe::{
    Access, Context, Errno, Error, ExposedRegion, ProtectionDomain, RemoteMemory, Sge, WcStatus, WorkRequest,
};

use crate::fake::{Config, Fake, Importing, Live, with_importing};
use crate::support::{on_each_interface, post, raw_pair, receive, seen};

/// A process that shares its context, a domain, and a region of 64 bytes.
struct Exporter {
    region: ExposedRegion,
    pd: ProtectionDomain,
}

impl Exporter {
    fn new(fake: &Fake) -> Self {
        let pd = fake.pd();
        let region = pd.expose(Pages::new(64).unwrap(), Access::REMOTE).unwrap();
        Exporter { region, pd }
    }

    fn descriptor(&self) -> OwnedFd {
        self.pd.context().command_fd().unwrap().try_clone_to_owned().unwrap()
    }

    /// The imports of another process.
    fn import(&self) -> (Context, ProtectionDomain, ImportedRegion) {
        import(self.descriptor(), self.pd.handle(), self.region.handle())
    }
}

fn import(fd: OwnedFd, pd: u32, mr: u32) -> (Context, ProtectionDomain, ImportedRegion) {
    // SAFETY: the caller passes handles of the exporter, which outlives the imports.
    unsafe {
        let context = Context::import(fd).unwrap();
        let pd = context.import_pd(pd).unwrap();
        let region = pd.import_mr(mr).unwrap();
        (context, pd, region)
    }
}

#[test]
fn work_of_an_importer_reaches_the_memory_of_the_exporter() {
    on_each_interface(|fake, interfaces| {
        let mut exporter = Exporter::new(fake);
        let (context, pd, imported) = exporter.import();
        assert!(!context.is_same(exporter.pd.context()) && !pd.is_same(&exporter.pd));
        assert_eq!((imported.len(), imported.is_empty(), imported.pd().is_same(&pd)), (64, false, true));
        let RemoteMemory { address, rkey, .. } = exporter.region.remote();
        assert_eq!((imported.rkey(), pd.handle()), (rkey, exporter.pd.handle()));

        let (mut a, mut b) = raw_pair(&pd, interfaces);
        // By the remote key, from memory of the importer.
        let mut outbox = pd.allocate(5).unwrap();
        outbox.fill_from(b"wrote").unwrap();
        let to = RemoteMemory { address, len: imported.len() as u64, rkey: imported.rkey() };
        post!(a, write(WorkRequest::new(1).signaled(), to.slice(8, 5).unwrap(), outbox.sge());).unwrap();
        assert_eq!(seen(&mut a.cq)[0].status, WcStatus::SUCCESS);
        let mut bytes = [0; 7];
        exporter.region.read(7, &mut bytes).unwrap();
        assert_eq!(&bytes, b"\0wrote\0");
        // By the local key, as if it were memory of the importer.
        exporter.region.write(40, b"sent").unwrap();
        let at = |offset: u64| Sge { address: address + offset, len: 4, lkey: imported.lkey() };
        receive!(b, 2, at(60)).unwrap();
        post!(a, send(WorkRequest::new(3).signaled(), at(40));).unwrap();
        assert_eq!((seen(&mut a.cq)[0].status, seen(&mut b.cq)[0].status), (WcStatus::SUCCESS, WcStatus::SUCCESS));
        exporter.region.read(60, &mut bytes[..4]).unwrap();
        assert_eq!(&bytes[..4], b"sent");
        // The keys are not valid in another domain of the importer.
        let (mut c, _d) = raw_pair(&context.alloc_pd().unwrap(), interfaces);
        post!(c, send(WorkRequest::new(4).signaled(), at(40));).unwrap();
        assert_eq!(seen(&mut c.cq)[0].status, WcStatus::LOC_PROT_ERR);
    });
}

#[test]
fn peers_reach_memory_of_an_importer_in_the_imported_domain() {
    on_each_interface(|fake, interfaces| {
        let exporter = Exporter::new(fake);
        let (_, pd, _) = exporter.import();
        let own = pd.parent_domain().unwrap().expose(Pages::new(8).unwrap(), Access::REMOTE).unwrap();
        assert!(own.pd().is_same(&pd));
        // Queue pairs of the exporter, in the domain that the importer has registered in.
        let (mut a, _b) = raw_pair(&exporter.pd, interfaces);
        let mut outbox = exporter.pd.allocate(8).unwrap();
        outbox.fill_from(b"exported").unwrap();
        post!(a, write(WorkRequest::new(1).signaled(), own.remote(), outbox.sge());).unwrap();
        assert_eq!(seen(&mut a.cq)[0].status, WcStatus::SUCCESS);
        let mut bytes = [0; 8];
        own.read(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"exported");
    });
}

/// Sends a descriptor and a message to another process.
fn send_descriptor(socket: &OwnedFd, fd: &OwnedFd, message: &[u8]) {
    let mut part = libc::iovec { iov_base: message.as_ptr().cast_mut().cast(), iov_len: message.len() };
    let mut control = [0_u64; 8];
    // SAFETY: zeros are a valid `msghdr`. Its buffers are valid during the call and long enough.
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        (header.msg_iov, header.msg_iovlen) = (&raw mut part, 1);
        (header.msg_control, header.msg_controllen) = (control.as_mut_ptr().cast(), libc::CMSG_SPACE(4) as _);
        let first = libc::CMSG_FIRSTHDR(&raw const header);
        ((*first).cmsg_level, (*first).cmsg_type) = (libc::SOL_SOCKET, libc::SCM_RIGHTS);
        (*first).cmsg_len = libc::CMSG_LEN(4) as _;
        libc::CMSG_DATA(first).cast::<i32>().write_unaligned(fd.as_raw_fd());
        assert_eq!(libc::sendmsg(socket.as_raw_fd(), &raw const header, 0), message.len() as isize);
    }
}

fn receive_descriptor(socket: &OwnedFd, message: &mut [u8]) -> OwnedFd {
    let mut part = libc::iovec { iov_base: message.as_mut_ptr().cast(), iov_len: message.len() };
    let mut control = [0_u64; 8];
    // SAFETY: as in `send_descriptor`. This process owns a descriptor that it has received.
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        (header.msg_iov, header.msg_iovlen) = (&raw mut part, 1);
        (header.msg_control, header.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control) as _);
        assert_eq!(libc::recvmsg(socket.as_raw_fd(), &raw mut header, 0), message.len() as isize);
        let first = libc::CMSG_FIRSTHDR(&raw const header);
        assert!(!first.is_null() && (*first).cmsg_type == libc::SCM_RIGHTS);
        OwnedFd::from_raw_fd(libc::CMSG_DATA(first).cast::<i32>().read_unaligned())
    }
}

#[test]
#[cfg_attr(miri, ignore = "passes a descriptor")]
fn a_context_is_imported_from_a_descriptor_received_over_a_socket() {
    let fake = Fake::new(Config::default());
    let (here, there) = UnixStream::pair().unwrap();
    let (here, there) = (OwnedFd::from(here), OwnedFd::from(there));
    let exporter = Exporter::new(&fake);
    let message = [exporter.pd.handle(), exporter.region.handle()].map(u32::to_ne_bytes);
    send_descriptor(&here, &exporter.descriptor(), message.as_flattened());

    let mut message = [[0; 4]; 2];
    let fd = receive_descriptor(&there, message.as_flattened_mut());
    let [pd, mr] = message.map(u32::from_ne_bytes);
    let (context, _, region) = import(fd, pd, mr);
    assert_eq!((context.device_name(), region.rkey()), (fake.name(), exporter.region.remote().rkey));
}

#[test]
fn imports_are_dropped_in_any_order_without_destroying_what_they_share() {
    for order in 0..120 {
        let fake = Fake::new(Config::default());
        let exporter = Exporter::new(&fake);
        let (context, pd, region) = exporter.import();
        let twice = pd.parent_domain().unwrap();
        let buffer = pd.allocate(8).unwrap();
        let mut things: Vec<Box<dyn Any>> =
            vec![Box::new(context), Box::new(pd), Box::new(region), Box::new(twice), Box::new(buffer)];
        let mut rest = order;
        while !things.is_empty() {
            drop(things.remove(rest % things.len()));
            rest /= things.len() + 1;
        }
        assert_eq!((fake.calls("ibv_unimport_pd"), fake.calls("ibv_unimport_mr")), (1, 1), "order {order}");
        assert_eq!((fake.calls("ibv_dealloc_pd"), fake.calls("ibv_dereg_mr")), (1, 1), "objects of the importer");
        assert_eq!(fake.live(), Live { contexts: 1, pds: 1, mrs: 1, ..Live::default() }, "objects of the exporter");
        if cfg!(miri) && order == 5 {
            return;
        }
    }
}

#[test]
fn an_imported_domain_is_released_after_its_last_object() {
    let fake = Fake::new(Config::default());
    let exporter = Exporter::new(&fake);
    let (context, pd, region) = exporter.import();
    let buffer = pd.allocate(8).unwrap();
    drop((context, pd));
    drop(region);
    assert_eq!((fake.calls("ibv_unimport_mr"), fake.calls("ibv_unimport_pd"), fake.live().contexts), (1, 0, 2));
    drop(buffer);
    assert_eq!((fake.calls("ibv_unimport_pd"), fake.calls("ibv_close_device")), (1, 1));
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn an_imported_domain_stays_while_a_region_cannot_be_deregistered() {
    let fake = Fake::new(Config::default());
    let exporter = Exporter::new(&fake);
    let (context, pd, region) = exporter.import();
    let buffer = pd.allocate(8).unwrap();
    fake.fail("ibv_dereg_mr", libc::EBUSY);
    drop((buffer, region, pd, context));
    assert_eq!(
        (fake.calls("ibv_unimport_mr"), fake.calls("ibv_unimport_pd"), fake.calls("ibv_close_device")),
        (1, 0, 0)
    );
    fake.heal("ibv_dereg_mr");
    fake.may_leak();
    std::mem::forget(exporter);
}

#[test]
fn handles_are_not_valid_in_a_context_that_was_opened_separately() {
    let fake = Fake::new(Config::default());
    let exporter = Exporter::new(&fake);
    let separate = fake.pd();
    // SAFETY: the provider checks the handles, and does not find them.
    let (pd, mr) = unsafe {
        (separate.context().import_pd(exporter.pd.handle()).err(), separate.import_mr(exporter.region.handle()).err())
    };
    assert!(matches!(pd, Some(Error::Verb { verb: Verb::ImportPd, errno: Errno(libc::ENOENT), .. })), "{pd:?}");
    assert!(matches!(mr, Some(Error::Verb { verb: Verb::ImportMr, errno: Errno(libc::ENOENT), .. })), "{mr:?}");
    let text = pd.unwrap().explain().unwrap().to_string();
    assert!(text.contains("handle"), "{text}");
}

#[test]
fn imports_of_an_older_kernel_are_refused_by_name_and_other_errors_are_reported() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    for (errno, unsupported) in [(libc::ENOSYS, true), (libc::ENOMEM, false)] {
        fake.fail("ibv_import_pd", errno);
        fake.fail("ibv_import_mr", errno);
        // SAFETY: the provider refuses every handle.
        let errors = unsafe { (pd.context().import_pd(1).unwrap_err(), pd.import_mr(1).unwrap_err()) };
        for (error, feature) in [(errors.0, "importing protection domains"), (errors.1, "importing memory regions")] {
            match error {
                Error::Unsupported { feature: named, .. } => assert_eq!((named, unsupported), (feature, true)),
                Error::Verb { errno: Errno(named), .. } => assert_eq!((named, unsupported), (errno, false)),
                error => panic!("{error}"),
            }
        }
    }
}

/// A socket to import, and its peer, which reads the end of the stream once all descriptors of the socket are closed.
fn watched() -> (OwnedFd, UnixStream) {
    let (socket, peer) = UnixStream::pair().unwrap();
    peer.set_nonblocking(true).unwrap();
    (socket.into(), peer)
}

fn is_closed(mut peer: &UnixStream) -> bool {
    match peer.read(&mut [0]) {
        Ok(read) => read == 0,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::WouldBlock);
            false
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "leaks a descriptor, and queries one that is not a file")]
fn a_descriptor_that_is_not_imported_is_not_closed_again() {
    let (fd, peer) = watched();
    let number = fd.as_raw_fd();
    // SAFETY: the import is refused.
    let import = |fd| unsafe { Context::import(fd) }.unwrap_err();
    let error = with_importing(Importing::Refuses(libc::EOPNOTSUPP), || import(fd));
    let device = format!("the device of descriptor {number}");
    assert_eq!(error.to_string(), format!("{device} does not support importing a context"));
    assert!(!is_closed(&peer), "the provider may have closed it, so it must not be closed again");

    let ((fd, peer), (other, others_peer)) = (watched(), watched());
    let error = with_importing(Importing::Fails(libc::EIO, other.as_raw_fd()), || import(fd));
    assert!(matches!(error, Error::Verb { verb: Verb::ImportDevice, errno: Errno(libc::EIO), .. }), "{error}");
    assert!(is_closed(&peer));
    drop(other);
    assert!(!is_closed(&others_peer), "another file now has this number, and must not be closed");
}

/// Number of descriptors of this process for the kernel's object of `context`.
fn descriptors(context: &Context) -> usize {
    let info = |fd: &str| std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap_or_default();
    let counter = |fd: &str| info(fd).lines().find(|line| line.starts_with("eventfd-count:")).map(str::to_owned);
    let own = counter(&context.command_fd().unwrap().as_raw_fd().to_string()).expect("a counter");
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    all.filter(|entry| counter(entry.as_ref().unwrap().file_name().to_str().unwrap()).as_ref() == Some(&own)).count()
}

#[test]
#[cfg_attr(miri, ignore = "reads /proc")]
fn a_descriptor_that_is_imported_is_closed_with_its_context() {
    let fake = Fake::new(Config::default());
    let exporter = Exporter::new(&fake);
    assert_eq!(descriptors(exporter.pd.context()), 1);
    let imported = exporter.import();
    assert_eq!(descriptors(exporter.pd.context()), 2);
    drop(imported);
    assert_eq!(descriptors(exporter.pd.context()), 1);
    // A context whose attributes cannot be queried is closed, too.
    fake.fail("query_device_ex", libc::EIO);
    // SAFETY: the import fails.
    let error = unsafe { Context::import(exporter.descriptor()) }.unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::QueryDeviceEx, errno: Errno(libc::EIO), .. }), "{error}");
    assert_eq!((descriptors(exporter.pd.context()), fake.live().contexts), (1, 1));
}
