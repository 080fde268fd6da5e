//! Peers that do not keep to the protocol are found out.

use super::*;

#[test]
fn a_lying_peer_is_found_out() {
    let limits = Limits {
        window: 2,
        max_window: 2,
        peer_window: 3,
        peer_max_window: 3,
        sends: 4,
        offers: OFFERS,
        is_active: true,
    };
    let flow = Flow::new(limits);
    let honest = Counts { window: 3, data: 3, control: CONTROL, answered: 0, is_out_of_credit: false };
    for lie in [
        Counts { data: 4, ..honest },
        Counts { data: u32::MAX, ..honest },
        Counts { data: 2, ..honest },
        Counts { control: CONTROL + 1, ..honest },
        Counts { control: 0, ..honest },
        Counts { window: 2, ..honest },
        Counts { window: 4, ..honest },
    ] {
        let [mut one, mut other] = [flow; 2];
        assert_eq!(one.received(lie), Err(Violation::ImpossibleCredit), "{lie:?}");
        assert_eq!(other.updated(lie), Err(Violation::ImpossibleCredit), "{lie:?}");
    }
    let mut flow = flow;
    (0..2).for_each(|_| flow.received(honest).unwrap());
    (0..CONTROL).for_each(|_| flow.updated(honest).unwrap());
    assert_eq!(flow.received(honest), Err(Violation::DataBeyondCredit));
    assert_eq!(flow.updated(honest), Err(Violation::ControlBeyondCredit));
}

#[test]
fn a_peer_that_lies_about_offers_is_found_out() {
    let limits = Limits {
        window: 8,
        max_window: 8,
        peer_window: 8,
        peer_max_window: 8,
        sends: 4,
        offers: OFFERS,
        is_active: true,
    };
    let mut flow = Flow::new(limits);
    let answered = |answered| Counts { window: 8, data: 8, control: CONTROL, answered, is_out_of_credit: false };
    flow.offer();
    for _ in 0..OFFERS {
        flow.offer_received().unwrap();
    }
    assert_eq!(flow.offer_received(), Err(Violation::OffersBeyondLimit));
    flow.offer_done();
    flow.answer().unwrap();
    flow.offer_received().unwrap();
    let mut other = flow;
    assert_eq!(other.received(answered(2)), Err(Violation::ImpossibleAnswer));
    assert_eq!(flow.answered(answered(0)), Err(Violation::ImpossibleAnswer));
    flow.answered(answered(1)).unwrap();
    assert_eq!(flow.answered(answered(1)), Err(Violation::ImpossibleAnswer));
    assert_eq!(flow.updated(answered(0)), Err(Violation::ImpossibleAnswer));
}

#[test]
fn a_peer_that_waives_what_it_does_not_have_is_found_out() {
    let limits = Limits {
        window: 1,
        max_window: 8,
        peer_window: 2,
        peer_max_window: 2,
        sends: 4,
        offers: OFFERS,
        is_active: true,
    };
    let mut flow = Flow::new(limits);
    let honest = Counts { window: 2, data: 2, control: CONTROL, answered: 0, is_out_of_credit: false };
    let mut lied = flow;
    assert_eq!(lied.waived(honest, 1), Err(Violation::ImpossibleWaiver), "of one, it needs one for the packet");
    flow.received(honest).unwrap();
    assert_eq!(flow.growth(), 0);
    flow.returned();
    flow.update().unwrap();
    flow.received(Counts { is_out_of_credit: true, ..honest }).unwrap();
    assert_eq!(flow.growth(), 1);
    flow.grow(flow.growth());
    flow.returned();
    flow.completed(Class::Control);
    flow.update().expect("the peer has no credit");
    for count in [2, u32::MAX] {
        let mut lied = flow;
        assert_eq!(lied.waived(honest, count), Err(Violation::ImpossibleWaiver));
    }
    flow.waived(honest, 1).unwrap();
    assert_eq!(flow.window(), 1);
}

#[test]
fn a_peer_that_sends_heartbeats_out_of_turn_is_found_out() {
    let limits = Limits {
        window: 1,
        max_window: 1,
        peer_window: 1,
        peer_max_window: 1,
        sends: 1,
        offers: OFFERS,
        is_active: false,
    };
    let honest = Counts { window: 1, data: 1, control: CONTROL, answered: 0, is_out_of_credit: false };
    let mut flow = Flow::new(limits);
    assert_eq!(flow.heartbeat_received(honest), Err(Violation::UnexpectedHeartbeat));
    flow.heartbeat().unwrap();
    assert_eq!(flow.heartbeat(), None, "it is the turn of the peer");
    flow.heartbeat_received(honest).unwrap();
    assert_eq!(flow.heartbeat(), None, "the send queue is full");
    flow.completed(Class::Heartbeat);
    flow.heartbeat().unwrap();
}
