//! Work queues, flows and counters. SoftRoCE lacks them, and the errors name the feature.

use rdma_safe::counters::{CompletionCount, CounterDescription};
use rdma_safe::device::DeviceCapabilities;
use rdma_safe::flow::{EspAction, FlowRule, UdpHeader};
use rdma_safe::{Error, InitOptions, QueuePairType, Result};

use crate::support::{Rdma, device, error_of, skip};

/// Checks that `result` is an error that names `feature`. Skips the test if another device than SoftRoCE supports it.
#[track_caller]
fn refused<T: std::fmt::Debug>(rdma: &Rdma, feature: &str, result: Result<T>) {
    if !rdma.is_rxe() && result.is_ok() {
        let _: Option<()> = skip(&format!("{} has {feature}", rdma.device_name()));
        return;
    }
    let error = error_of(result);
    assert!(matches!(error, Error::Unsupported { feature: named, .. } if named.starts_with(feature)), "{error}");
}

#[test]
fn work_queues_are_refused_by_name() {
    let Some(rdma) = device() else { return };
    let (pd, cq) = (rdma.pd(), rdma.completion_queue(8).build().unwrap());
    refused(&rdma, "work queues", pd.work_queue(&cq, 8).build());
    if rdma.attributes().receive_side_scaling().is_none() {
        refused(&rdma, "receive-side scaling", rdma.indirection_table(&[]));
    }
    assert!(!rdma.is_rxe() || rdma.attributes().max_receive_work_queues() == 0);
}

#[test]
fn flows_and_counters_are_refused_by_name() {
    let Some(rdma) = device() else { return };
    let (pd, cq) = (rdma.pd(), rdma.completion_queue(8).build().unwrap());
    let mut qp = pd.queue_pair(&cq, &cq).qp_type(QueuePairType::UD).build().unwrap();
    qp.init_datagrams(1, &InitOptions::default().port(rdma.port).gid_index(rdma.gid.index)).unwrap();
    let ports = |dst_port| UdpHeader { dst_port, src_port: 0 };
    let rule = FlowRule::new(rdma.port).matching(ports(7), ports(0xffff));
    assert!(!rdma.is_rxe() || !rdma.attributes().capabilities().contains(DeviceCapabilities::MANAGED_FLOW_STEERING));
    if !rdma.attributes().capabilities().contains(DeviceCapabilities::MANAGED_FLOW_STEERING) {
        refused(&rdma, "flow steering", rule.steer(&qp));
    }
    let counters = rdma.create_counters();
    if let Ok(counters) = &counters {
        counters.attach(CounterDescription::PACKETS, 0).unwrap();
    }
    refused(&rdma, "counters of flows", counters);
    refused(&rdma, "flow actions of ESP", EspAction::new().create(&rdma));
}

#[test]
fn completion_counters_are_refused_and_the_required_release_is_named() {
    let Some(rdma) = device() else { return };
    refused(&rdma, "completion counters (ibv_create_comp_cntr, of rdma-core 65)", rdma.completion_counter_caps());
    refused(&rdma, "completion counters", rdma.completion_counter(CompletionCount::WorkRequests));
}
