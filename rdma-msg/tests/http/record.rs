//! The observable result of a scenario, as bytes.

use std::fmt::Display;

use http::{HeaderMap, Response};
use http_body_util::BodyExt;
use hyper::body::{Body, Bytes, Incoming};

/// Everything that a client observes: statuses, headers, bodies, trailers and errors.
#[derive(Default)]
pub(crate) struct Record(Vec<u8>);

impl Record {
    pub(crate) fn line(&mut self, text: impl Display) {
        self.0.extend_from_slice(text.to_string().as_bytes());
        self.0.push(b'\n');
    }

    /// All headers, except the date.
    pub(crate) fn headers(&mut self, kind: &str, headers: &HeaderMap) {
        for (name, value) in headers.iter().filter(|(name, _)| *name != http::header::DATE) {
            self.line(format_args!("{kind} {name}: {}", value.as_bytes().escape_ascii()));
        }
    }

    pub(crate) fn bytes(&mut self, kind: &str, bytes: &[u8]) {
        self.line(format_args!("{kind} of {} bytes", bytes.len()));
        self.0.extend_from_slice(bytes);
        self.0.push(b'\n');
    }

    /// Reads a response to its end or its error.
    pub(crate) async fn response<E: std::error::Error>(&mut self, name: &str, response: Result<Response<Incoming>, E>) {
        self.line(format_args!("== {name}"));
        match response {
            Ok(response) => {
                let (head, body) = response.into_parts();
                self.line(format_args!("{:?} {}", head.version, head.status));
                self.headers("header", &head.headers);
                self.body(body).await;
            }
            Err(error) => self.error(&error),
        }
    }

    /// Reads a body to its end or its error. The boundaries between its frames are not recorded.
    pub(crate) async fn body<B: Body<Data = Bytes, Error: std::error::Error> + Unpin>(&mut self, mut body: B) {
        let (mut data, mut trailers, mut failure) = (Vec::new(), None, None);
        while let Some(frame) = body.frame().await {
            match frame.map(hyper::body::Frame::into_data) {
                Ok(Ok(bytes)) => data.extend_from_slice(&bytes),
                Ok(Err(frame)) => trailers = frame.into_trailers().ok(),
                // Later frames may repeat the error without end.
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
        }
        match failure {
            // The part of the body that arrives before a reset depends on the timing.
            Some(error) => self.error(&error),
            None => self.bytes("body", &data),
        }
        if let Some(trailers) = trailers {
            self.headers("trailer", &trailers);
        }
    }

    /// An error with its sources.
    pub(crate) fn error(&mut self, error: &dyn std::error::Error) {
        let mut next = Some(error);
        while let Some(error) = next {
            self.line(format_args!("error: {error}"));
            next = error.source();
        }
    }

    /// Panics if an error was recorded.
    #[track_caller]
    pub(crate) fn assert_no_error(&self) {
        let prefix = b"\nerror: ";
        if let Some(at) = self.0.windows(prefix.len()).position(|bytes| bytes == prefix) {
            panic!("{}", self.0[at..(at + 200).min(self.0.len())].escape_ascii());
        }
    }

    pub(crate) fn append(&mut self, other: Record) {
        self.0.extend_from_slice(&other.0);
    }

    /// Panics with the first different place.
    #[track_caller]
    pub(crate) fn assert_same(&self, expected: &Record, what: &str) {
        assert!(!expected.0.is_empty(), "{what}: nothing was recorded");
        if self.0 != expected.0 {
            let at = self.0.iter().zip(&expected.0).take_while(|(left, right)| left == right).count();
            let around = |bytes: &[u8]| {
                bytes[at.saturating_sub(300).min(bytes.len())..(at + 300).min(bytes.len())].escape_ascii().to_string()
            };
            let (actual, expected) = (around(&self.0), around(&expected.0));
            panic!("{what} differs at byte {at}:\n--- TCP\n{expected}\n--- RDMA\n{actual}");
        }
    }
}
