//! Objects that are dropped while the device uses them.

use rdma_safe::mr::Pages;
use rdma_safe::{Access, Endpoint, Work};

use crate::{connected, domain};

#[test]
fn endpoints_and_regions_are_dropped_during_transfers() {
    let pd = domain();
    std::thread::scope(|scope| {
        for thread in 0..2_usize {
            let pd = &pd;
            scope.spawn(move || {
                for round in 0..40 {
                    let (mut a, mut b) = connected(&Endpoint::builder(pd).peer_access(Access::REMOTE));
                    let region = pd.expose(Pages::new(8192).unwrap(), Access::REMOTE).unwrap();
                    for _ in 0..4 {
                        b.receive(pd.allocate(4096).unwrap()).unwrap();
                        a.send(pd.allocate(4000).unwrap()).unwrap();
                        a.post(Work::write(pd.allocate(8000).unwrap(), region.remote())).unwrap();
                        a.post(Work::read(pd.allocate(8000).unwrap(), region.remote())).unwrap();
                    }
                    match (round + thread) % 3 {
                        0 => drop((region, a, b)),
                        1 => drop((b, region, a)),
                        _ => drop((a, b, region)),
                    }
                }
            });
        }
    });
}
