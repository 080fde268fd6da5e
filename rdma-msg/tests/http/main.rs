//! hyper and tonic over streams: a client observes the same over TCP and over soft0, also with loss and delay.
//!
//! `RDMA_MSG_HTTP_STREAMS` is the number of concurrent HTTP/2 streams of the tests with many, 300 by default, and
//! `RDMA_MSG_HTTP_SECONDS` the time for which they stay busy, 2 by default. The stage `explore` of `cargo xtask test` has 10 000 of
//! them for a minute.

#[path = "../../../rdma-async/tests/support/mod.rs"]
mod support;

mod busy;
mod grpc;
mod http1;
mod http2;
mod plain;
mod record;
mod server;
mod transport;

use rdma_safe::soft::{self, Faults};
use support::{soft0, soon};
use tokio::sync::RwLock;
use transport::{Rdma, Tcp};

/// Faults concern all tests of the process: a test that injects some is alone.
static NETWORK: RwLock<()> = RwLock::const_new(());

/// Each scenario has a test without faults, and is part of the tests with faults.
macro_rules! scenarios {
    ($($name:ident: $module:ident::$scenario:ident,)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                let _soft = soft0();
                let _network = NETWORK.read().await;
                let expected = soon($module::$scenario::<Tcp>()).await;
                soon($module::$scenario::<Rdma>()).await.assert_same(&expected, stringify!($name));
            }
        )*

        async fn all_scenarios_with(faults: Faults) {
            let _soft = soft0();
            let _network = NETWORK.write().await;
            $(
                let expected = soon($module::$scenario::<Tcp>()).await;
                soft::set_faults(faults).unwrap();
                soon($module::$scenario::<Rdma>()).await.assert_same(&expected, stringify!($name));
                soft::set_faults(Faults::default()).unwrap();
            )*
        }
    };
}

scenarios! {
    http1_connections_are_kept_alive: http1::keep_alive,
    http1_bodies_stream_in_both_directions_at_once: http1::large_bodies,
    http1_bodies_that_are_aborted_end_at_the_other_side: http1::aborted_bodies,
    http2_requests_share_a_connection: http2::many_requests_at_once,
    http2_bodies_stream_in_both_directions_at_once: http2::large_bodies,
    http2_resets_concern_one_stream: http2::resets_and_cancellation,
    http2_slow_readers_hold_up_no_other_stream: http2::slow_readers,
    http2_shutdown_answers_requests_in_flight: http2::graceful_shutdown,
    http2_clients_learn_that_the_server_is_gone: http2::unreachable,
    http2_many_streams_fill_both_directions: http2::flood,
    grpc_calls_of_one_message: grpc::unary,
    grpc_streams_of_messages: grpc::streaming,
    grpc_cancellation_reaches_the_server: grpc::cancellation,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http2_streams_stay_busy_in_both_directions() {
    let _soft = soft0();
    let _network = NETWORK.read().await;
    busy::streams_stay_busy::<Rdma>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn results_are_the_same_with_loss() {
    for seed in 1..3 {
        let faults = Faults::default().with_seed(seed).with_drop(0.005).with_dup(0.002).with_reorder(0.005);
        all_scenarios_with(faults).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn results_are_the_same_with_delay() {
    all_scenarios_with(Faults::default().with_seed(3).with_delay(std::time::Duration::from_micros(200))).await;
}
