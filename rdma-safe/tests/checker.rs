//! soft0's checker, through `rdma_safe::soft::check`.

use std::time::Duration;

use rdma_safe::soft::check::{Kind, Options, Session};
use rdma_safe::{Device, Endpoint, WcStatus, soft};

/// Only a test that hangs waits for so long.
const DEADLINE: Duration = Duration::from_secs(60);

#[test]
fn a_report_names_the_wr_id_of_the_work() {
    soft::install().unwrap();
    let session = Session::start(Options::default()).unwrap();
    let pd = Device::first().unwrap().open().unwrap().alloc_pd().unwrap();
    let [mut a, mut b] = [(); 2].map(|()| Endpoint::builder(&pd).build().unwrap());
    a.connect(&b.address()).unwrap();
    b.connect(&a.address()).unwrap();
    let receive = b.receive(pd.allocate(10).unwrap()).unwrap();
    let send = a.send(pd.allocate(11).unwrap()).unwrap();
    assert!(!send.is_receive() && send.wr_id() >> 62 == 0, "{send:?}");

    let failed = b.wait(DEADLINE).unwrap().ok().unwrap_err();
    assert_eq!((failed.0.id, failed.0.status), (receive, WcStatus::LOC_LEN_ERR));
    assert_eq!(failed.error().wr_id | 1 << 63, receive.wr_id(), "without the mark of receives");
    let reports = session.take_reports();
    let [report] = &reports[..] else { panic!("{reports:?}") };
    assert_eq!(
        (report.kind, report.qp, report.wr_id),
        (Kind::ReceiveTooSmall, Some(b.address().qp_num), Some(receive.wr_id()))
    );
}
