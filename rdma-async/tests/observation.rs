//! What subscribers of events and recorders of metrics see.
#![cfg(all(feature = "metrics", feature = "tracing"))]

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex};

use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use rdma_async::{Connector, Listener};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Collects the messages of events.
#[derive(Clone, Default)]
struct Messages(Arc<Mutex<Vec<String>>>);

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            write!(self.0, "{value:?}").unwrap();
        }
    }
}

impl Subscriber for Messages {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("rdma_async")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }

    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[tokio::test]
async fn connections_and_counts_are_observed() {
    rdma_safe::soft::install().unwrap();
    let messages = Messages::default();
    let _guard = tracing::subscriber::set_default(messages.clone());
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();

    let listener = Listener::bind("127.0.0.1:0").await.unwrap();
    let connector = Connector::new().unwrap();
    let (client, server) = tokio::join!(connector.connect(listener.local_address()), listener.accept());
    let (client, server) = (client.unwrap(), server.unwrap());
    client.send(client.buffer_of(b"hello").await.unwrap()).await.unwrap();
    assert_eq!(*server.receive().await.unwrap().unwrap(), *b"hello");
    drop(client);
    assert!(server.receive().await.unwrap().is_none());
    drop(server);

    metrics::with_local_recorder(&recorder, || connector.driver().record_metrics());
    let counts: HashMap<_, _> = snapshotter
        .snapshot()
        .into_vec()
        .into_iter()
        .map(|(key, _, _, value)| (key.key().name().to_owned(), value))
        .collect();
    assert_eq!(counts["rdma_async_posted"], DebugValue::Counter(1));
    assert_eq!(counts["rdma_async_received"], DebugValue::Counter(1));
    assert_eq!(*messages.0.lock().unwrap(), ["connected", "connected", "closing", "closing"]);
}
