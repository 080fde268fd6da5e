//! Traffic counters, of the process and of a thread, and the file that a process appends them to.

mod datagrams;

use std::process::Command;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use rdma_soft::abi::{ibv_alloc_pd, ibv_get_device_list, ibv_open_device, ibv_query_gid};
use rdma_soft::{counters, packets_of_thread};
use rdma_sys::{Zeroed, ibv_ah_attr, ibv_gid, ibv_global_route, ibv_poll_cq, ibv_qp, ibv_wc};

use datagrams::{datagrams, send};

/// BTH, DETH, four bytes of payload and the invariant CRC.
const PACKET: u64 = 12 + 8 + 4 + 4;
const STATS: &str = "RDMA_SOFT_STATS";

#[test]
#[cfg_attr(miri, ignore = "it opens sockets and starts processes")]
fn traffic_is_counted_and_reported_when_the_process_exits() {
    if std::env::var_os(STATS).is_some() {
        return exchange();
    }
    let file = std::env::temp_dir().join(format!("rdma-soft-stats-{}", std::process::id()));
    for _ in 0..2 {
        let mut program = Command::new(std::env::current_exe().unwrap());
        let test = "traffic_is_counted_and_reported_when_the_process_exits";
        let output = program.args(["--exact", test]).env(STATS, &file).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert_eq!(text.lines().count(), 2, "expected a line for each process: {text}");
    for line in text.lines() {
        let (sent, bytes) = (3, 3 * PACKET);
        let expected =
            format!(" sent_packets={sent} sent_bytes={bytes} received_packets={sent} received_bytes={bytes}");
        assert!(line.starts_with("pid=") && line.ends_with(&expected), "{line}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn packets_count_for_the_thread_that_moves_them() {
    let (from, to, peer) = ends();
    let mut wc = ibv_wc::zeroed();
    let start = Instant::now();
    // The server thread may be faster.
    while packets_of_thread() == 0 {
        assert!(start.elapsed() < Duration::from_secs(30), "this thread has moved no packet");
        // SAFETY: the objects are never destroyed.
        unsafe {
            send(from, to, peer);
            assert_eq!(ibv_poll_cq((*to).recv_cq, 1, &mut wc), 0);
        }
    }
    assert_eq!(std::thread::spawn(packets_of_thread).join().unwrap(), 0);
}

/// Two queue pairs of this device, and the address of the device.
fn ends() -> (*mut ibv_qp, *mut ibv_qp, ibv_ah_attr) {
    // SAFETY: each object is created from the previous ones, which stay.
    unsafe {
        let context = ibv_open_device(*ibv_get_device_list(null_mut()));
        let pd = ibv_alloc_pd(context);
        let [from, to] = [(); 2].map(|()| datagrams(pd));
        let mut dgid = ibv_gid { raw: [0; 16] };
        assert_eq!(ibv_query_gid(context, 1, 0, &mut dgid), 0);
        let grh = ibv_global_route { dgid, ..ibv_global_route::zeroed() };
        (from, to, ibv_ah_attr { grh, is_global: 1, port_num: 1, ..ibv_ah_attr::zeroed() })
    }
}

/// Sends three datagrams within this device.
fn exchange() {
    let (from, to, peer) = ends();
    // SAFETY: the objects are never destroyed.
    unsafe {
        for _ in 0..3 {
            send(from, to, peer);
        }
        let mut wc = ibv_wc::zeroed();
        while counters().received_packets < 3 {
            // No receive was posted, so nothing completes.
            assert_eq!(ibv_poll_cq((*to).recv_cq, 1, &mut wc), 0);
        }
    }
}
