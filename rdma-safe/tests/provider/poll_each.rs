//! `poll_each` hands out the same completions as `poll`.

use rdma_safe::interface::Interface;
use rdma_safe::mr::Pages;
use rdma_safe::{Access, Completion, Endpoint, ProtectionDomain, Work};

use crate::endpoint_sets::Service;
use crate::support::{endpoints, on_each_interface};

/// What a program sees of a completion.
fn seen(done: &Completion) -> String {
    let Completion { id, operation, status, byte_len, buffer, .. } = done;
    format!("{id:?} {operation:?} {status:?} {byte_len} {:?} {:?}", buffer.as_deref(), done.imm())
}

/// Posts messages with and without immediate data, unsignaled work, writes that notify and reads, and then ends the connection.
fn work<I: Interface>(pd: &ProtectionDomain, a: &mut Endpoint<I>, b: &mut Endpoint<I>, is_last: bool) {
    let exposed = pd.expose(Pages::new(64).unwrap(), Access::REMOTE).unwrap();
    let remote = exposed.remote();
    for number in 0..2_u8 {
        b.receive(pd.allocate(16).unwrap()).unwrap();
        let mut buffer = pd.allocate(8).unwrap();
        buffer.fill_from(&[number; 5]).unwrap();
        a.send(buffer).unwrap();
    }
    a.post(Work::write(pd.allocate(4).unwrap(), remote).unsignaled()).unwrap();
    for number in 0..2 {
        b.receive(pd.allocate(16).unwrap()).unwrap();
        a.post(Work::send(pd.allocate(3).unwrap()).imm(number)).unwrap();
    }
    b.receive(pd.allocate(16).unwrap()).unwrap();
    a.post(Work::write_inline(b"notice", remote).imm(7)).unwrap();
    a.read(pd.allocate(8).unwrap(), remote.slice(0, 8).unwrap()).unwrap();
    if is_last {
        // Too long for the receive, which ends the connection.
        b.receive(pd.allocate(2).unwrap()).unwrap();
        a.send(pd.allocate(16).unwrap()).unwrap();
        let _ = a.send(pd.allocate(16).unwrap());
    }
}

/// All completions of the queue, taken `max` at a time, or one at a time by `poll` if `max` is 0.
fn take<I: Interface>(endpoint: &mut Endpoint<I>, max: usize) -> Vec<String> {
    let mut all = Vec::new();
    loop {
        let before = all.len();
        let taken = match max {
            0 => usize::from(endpoint.poll_with(|done| all.push(seen(&done))).unwrap().is_some()),
            max => endpoint.poll_each(max, |done| all.push(seen(&done))).unwrap(),
        };
        assert_eq!(all.len() - before, taken);
        assert!(max == 0 || taken <= max);
        if taken == 0 {
            return all;
        }
    }
}

#[test]
fn an_endpoint_takes_several_completions_as_it_takes_single_ones() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let run = |max| {
            let (mut a, mut b) = endpoints(&pd, interfaces);
            [false, true].map(|is_last| {
                work(&pd, &mut a, &mut b, is_last);
                (take(&mut a, max), take(&mut b, max))
            })
        };
        let single = run(0);
        assert!(single[0].0.len() >= 6 && single[0].1.len() == 5, "{single:#?}");
        for max in [1, 2, 3, 32] {
            assert_eq!(run(max), single, "{max} at a time");
        }
    });
}

#[test]
fn poll_each_of_none_takes_nothing() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        work(&pd, &mut a, &mut b, false);
        assert_eq!(a.poll_each(0, |_| panic!("nothing was asked for")).unwrap(), 0);
        assert!(a.poll().unwrap().is_some());
    });
}

#[test]
fn a_set_takes_several_completions_of_several_endpoints() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let run = |max: usize| {
            let mut service = Service::new(&pd, interfaces, 3, None);
            let calls: Vec<_> = (0..4_u8).flat_map(|round| (0..3).map(move |index| (round, index))).collect();
            for (round, index) in &calls {
                let mut endpoint = service.set.endpoint(service.keys[*index]).unwrap();
                endpoint.receive(pd.allocate(16).unwrap()).unwrap();
                service.say(*index, &[*round; 4]);
            }
            for (_, index) in calls {
                service.peers[index].receive(pd.allocate(16).unwrap()).unwrap();
                let mut endpoint = service.set.endpoint(service.keys[index]).unwrap();
                endpoint.post(Work::send(pd.allocate(4).unwrap()).imm(index as u32)).unwrap();
            }
            let mut all = Vec::new();
            loop {
                let keys = &service.keys;
                let mut see = |key, done: Completion| {
                    all.push((keys.iter().position(|known| *known == key), seen(&done)));
                };
                let taken = match max {
                    0 => service.set.poll().unwrap().map_or(0, |(key, done)| {
                        see(key, done);
                        1
                    }),
                    max => service.set.poll_each(max, see).unwrap(),
                };
                if taken == 0 {
                    break all;
                }
            }
        };
        let single = run(0);
        assert_eq!(single.len(), 24);
        for max in [1, 5, 64] {
            assert_eq!(run(max), single, "{max} at a time");
        }
    });
}
