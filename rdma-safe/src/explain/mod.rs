//! Explanations of failed work and failed calls.
//!
//! [`Endpoint::explain`](crate::Endpoint::explain) and [`QueuePair::explain`] return an [`Explanation`] of failed work.
//! [`Error::explain`](crate::Error::explain) returns the usual cause of a failed call.

mod causes;
mod errno;

use std::fmt;

pub(crate) use errno::{advice, advice_on_opening, runs_on_soft0};

use crate::device::{Quirks, TransportType};
use crate::endpoint::FailedWork;
use crate::{
    CompletionError, Context, LinkLayer, Operation, PortState, QueuePair, QueuePairType, Result, WcOpcode, WcStatus,
};

/// The network behind a port.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Network {
    /// InfiniBand. A subnet manager assigns addresses (LIDs).
    InfiniBand,
    /// RDMA over Converged Ethernet, addressed by GID: over UDP port 4791, or in version 1 directly over Ethernet.
    Roce,
    /// iWARP, over TCP.
    Iwarp,
}

impl Network {
    pub(crate) fn of(transport: TransportType, link_layer: Option<LinkLayer>) -> Option<Network> {
        match (transport, link_layer) {
            (TransportType::IWARP, _) => Some(Network::Iwarp),
            (TransportType::IB, Some(LinkLayer::ETHERNET)) => Some(Network::Roce),
            (TransportType::IB, Some(_)) => Some(Network::InfiniBand),
            _ => None,
        }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Network::InfiniBand => "InfiniBand",
            Network::Roce => "RoCE",
            Network::Iwarp => "iWARP",
        })
    }
}

/// Known properties of failed work, which narrow down [`CompletionError::explain_with`].
///
/// A failed completion does not report the operation: its opcode is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[must_use]
pub struct WorkContext {
    operation: Option<WcOpcode>,
    qp_type: Option<QueuePairType>,
    network: Option<Network>,
    quirks: Option<Quirks>,
}

impl WorkContext {
    /// Sets the operation; [`WcOpcode::RECV`] for a receive.
    pub fn operation(mut self, operation: WcOpcode) -> Self {
        self.operation = Some(operation);
        self
    }

    /// Sets the quirks of the device: [`Context::quirks`].
    pub fn quirks(mut self, quirks: Quirks) -> Self {
        self.quirks = Some(quirks);
        self
    }

    /// Sets the type of the queue pair.
    pub fn qp_type(mut self, qp_type: QueuePairType) -> Self {
        self.qp_type = Some(qp_type);
        self
    }

    /// Sets the network: [`Context::network`].
    pub fn network(mut self, network: Network) -> Self {
        self.network = Some(network);
        self
    }

    /// Whether the operation is one of these, or unknown.
    fn may_be(&self, operations: &[WcOpcode]) -> bool {
        self.operation.is_none_or(|operation| operations.contains(&operation))
    }

    fn may_be_type(&self, qp_type: QueuePairType) -> bool {
        self.qp_type.is_none_or(|own| own == qp_type)
    }

    fn may_be_over(&self, network: Network) -> bool {
        self.network.is_none_or(|own| own == network)
    }

    fn may_have(&self, quirk: Quirks) -> bool {
        self.quirks.is_none_or(|own| own.contains(quirk))
    }
}

impl fmt::Display for WorkContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.operation {
            Some(operation) => write!(f, "{operation}")?,
            None => f.write_str("work")?,
        }
        if let Some(qp_type) = self.qp_type {
            write!(f, " on {} queue pair", qp_type.with_article())?;
        }
        match self.network {
            Some(network) => write!(f, " over {network}"),
            None => Ok(()),
        }
    }
}

/// The likely causes of failed work, with related facts about its queue pair. Formatted as one line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Explanation {
    error: CompletionError,
    work: WorkContext,
    causes: Vec<&'static str>,
    facts: Vec<String>,
}

impl Explanation {
    fn new(error: CompletionError, work: WorkContext) -> Self {
        let causes = causes::of(error.status, &work);
        Explanation { error, work, causes, facts: Vec::new() }
    }

    /// The error, with the vendor's code.
    #[must_use]
    pub fn error(&self) -> CompletionError {
        self.error
    }

    /// The known properties of the work.
    pub fn work_context(&self) -> WorkContext {
        self.work
    }

    /// Likely causes, the most likely first, each with advice.
    #[must_use]
    pub fn causes(&self) -> &[&'static str] {
        &self.causes
    }

    /// Related facts about the queue pair and its port, such as the peer's address; empty if these were not queried.
    #[must_use]
    pub fn facts(&self) -> &[String] {
        &self.facts
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CompletionError { status, vendor_error, .. } = self.error;
        write!(f, "{}: {status} (vendor error {vendor_error:#x})", self.work)?;
        for (index, cause) in self.causes.iter().enumerate() {
            f.write_str(if index == 0 { ": " } else { "; or " })?;
            f.write_str(cause)?;
        }
        match self.facts.is_empty() {
            true => Ok(()),
            false => write!(f, " [{}]", self.facts.join(", ")),
        }
    }
}

impl CompletionError {
    /// The likely causes for any operation. [`QueuePair::explain`] and [`Endpoint::explain`](crate::Endpoint::explain)
    /// are more specific.
    #[must_use]
    pub fn explain(&self) -> Explanation {
        self.explain_with(WorkContext::default())
    }

    /// Like [`CompletionError::explain`], for known properties of the work.
    #[must_use]
    pub fn explain_with(&self, work: WorkContext) -> Explanation {
        Explanation::new(*self, work)
    }
}

impl FailedWork {
    /// The likely causes. [`Endpoint::explain`](crate::Endpoint::explain) is more specific.
    #[must_use]
    pub fn explain(&self) -> Explanation {
        self.error().explain_with(WorkContext::default().operation(opcode(self.0.operation)))
    }

    /// Like [`FailedWork::explain`], with facts about the queue pair of the work.
    pub(crate) fn explain_by(&self, qp: &QueuePair) -> Explanation {
        let explanation = qp.explain(&self.error(), opcode(self.0.operation));
        match self.0.exceeded_share() {
            None => explanation,
            Some(_) => Explanation { causes: vec![EXCEEDED_SHARE], ..explanation },
        }
    }
}

const EXCEEDED_SHARE: &str = "the peer has more messages waiting than EndpointBuilder::receive_share: it has more requests \
     unanswered than the protocol allows, or the share is too small";

impl QueuePair {
    /// Explains why `operation` of this queue pair failed.
    ///
    /// Queries the queue pair and its port, with system calls.
    ///
    /// ```no_run
    /// # use rdma_safe::{CompletionQueue, QueuePair, WcOpcode};
    /// # fn example(cq: &mut CompletionQueue, qp: &QueuePair) -> rdma_safe::Result<()> {
    /// let mut poll = cq.poll();
    /// while let Some(completion) = poll.next()? {
    ///     if let Err(error) = completion.ok() {
    ///         // The program knows which operation it has posted under that identifier.
    ///         eprintln!("{}", qp.explain(&error, WcOpcode::RDMA_WRITE));
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn explain(&self, error: &CompletionError, operation: WcOpcode) -> Explanation {
        let mut work = WorkContext::default().operation(operation).qp_type(self.qp_type());
        work.quirks = Some(self.context().quirks());
        let queried = self.query().ok();
        let port = queried.as_ref().and_then(|attributes| attributes.port()).filter(|port| *port != 0);
        work.network = port.and_then(|port| self.context().network(port).ok().flatten());
        let mut explanation = error.explain_with(work);
        let unanswered =
            matches!(error.status, WcStatus::RETRY_EXC_ERR | WcStatus::RNR_RETRY_EXC_ERR | WcStatus::RESP_TIMEOUT_ERR);
        let (Some(attributes), true) = (queried, unanswered) else { return explanation };
        let facts = &mut explanation.facts;
        if let Some(number) = attributes.dest_qp_num() {
            facts.push(format!("peer: queue pair {number:#08x}"));
        }
        match attributes.address() {
            Some(crate::address::AddressVector { route: Some(route), .. }) => {
                facts.push(format!("GID {} from GID index {}", route.dgid, route.sgid_index));
            }
            Some(address) => facts.push(format!("LID {}", address.dlid)),
            None => {}
        }
        if error.status == WcStatus::RNR_RETRY_EXC_ERR {
            facts.extend(attributes.rnr_retry().map(|retries| format!("rnr_retry {retries}")));
        } else {
            facts.extend(attributes.path_mtu().map(|mtu| format!("path MTU {mtu}")));
            facts.extend(attributes.timeout().map(|timeout| format!("timeout {timeout}")));
            facts.extend(attributes.retry_count().map(|retries| format!("retry_count {retries}")));
            let state = port.and_then(|port| self.context().query_port(port).ok()).map(|port| port.state());
            facts.extend(state.filter(|state| *state != PortState::ACTIVE).map(|state| format!("the port is {state}")));
        }
        explanation
    }
}

impl Context {
    /// The network behind `port`; `None` if verbs do not define it.
    ///
    /// # Errors
    /// The errors of [`Context::query_port`].
    pub fn network(&self, port: u8) -> Result<Option<Network>> {
        let link_layer = self.query_port(port)?.link_layer();
        Ok(Network::of(self.transport_type(), Some(link_layer)))
    }
}

/// A representative opcode of the operation.
fn opcode(operation: Operation) -> WcOpcode {
    match operation {
        Operation::Send => WcOpcode::SEND,
        Operation::Write => WcOpcode::RDMA_WRITE,
        Operation::Read => WcOpcode::RDMA_READ,
        Operation::Atomic => WcOpcode::FETCH_ADD,
        Operation::Receive => WcOpcode::RECV,
        Operation::ReceiveWrite => WcOpcode::RECV_RDMA_WITH_IMM,
        Operation::Keepalive => WcOpcode::RDMA_WRITE,
        Operation::BindWindow => WcOpcode::BIND_MW,
        Operation::InvalidateWindow => WcOpcode::LOCAL_INV,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explain(status: WcStatus, work: WorkContext) -> String {
        let error = CompletionError { status, vendor_error: 0x51, wr_id: 7, qp_num: None };
        error.explain_with(work).to_string()
    }

    fn of(operation: WcOpcode) -> WorkContext {
        WorkContext::default().operation(operation)
    }

    #[test]
    #[cfg_attr(miri, ignore = "takes minutes, and there is nothing unsafe in it")]
    fn every_status_has_a_cause() {
        for status in WcStatus::KNOWN.iter().copied().chain([WcStatus(200)]) {
            for operation in WcOpcode::KNOWN.iter().copied().map(Some).chain([None]) {
                for qp_type in QueuePairType::KNOWN.iter().copied().map(Some).chain([None]) {
                    for network in [None, Some(Network::InfiniBand), Some(Network::Roce), Some(Network::Iwarp)] {
                        let work = WorkContext { operation, qp_type, network, quirks: None };
                        let error = CompletionError { status, vendor_error: 0, wr_id: 0, qp_num: None };
                        let explanation = error.explain_with(work);
                        assert!(!explanation.causes().is_empty(), "{status}: {work}");
                        let mut causes = explanation.causes().to_vec();
                        causes.sort_unstable();
                        causes.dedup();
                        assert_eq!(causes.len(), explanation.causes().len(), "{status}: {work}");
                    }
                }
            }
        }
    }

    #[test]
    fn an_explanation_is_one_line_with_work_and_cause() {
        let known = of(WcOpcode::RDMA_WRITE).qp_type(QueuePairType::RC).network(Network::Roce);
        let text = explain(WcStatus::REM_ACCESS_ERR, known);
        let expected =
            "RDMA_WRITE on an RC queue pair over RoCE: remote access error (vendor error 0x51): the rkey does not ";
        assert!(text.starts_with(expected), "{text}");
        assert!(!text.contains('\n'));
        let error = CompletionError { status: WcStatus::SUCCESS, vendor_error: 0, wr_id: 1, qp_num: None };
        assert_eq!(error.explain().to_string(), "work: success (vendor error 0x0): the work is done");
    }

    #[test]
    fn the_missing_access_matches_the_operation() {
        for (operation, right) in [
            (WcOpcode::RDMA_WRITE, "REMOTE_WRITE"),
            (WcOpcode::RDMA_READ, "REMOTE_READ"),
            (WcOpcode::COMP_SWAP, "REMOTE_ATOMIC"),
            (WcOpcode::FETCH_ADD, "REMOTE_ATOMIC"),
        ] {
            let text = explain(WcStatus::REM_ACCESS_ERR, of(operation));
            for other in ["REMOTE_WRITE", "REMOTE_READ", "REMOTE_ATOMIC"] {
                assert_eq!(text.contains(other), other == right, "{operation}: {text}");
            }
        }
    }

    #[test]
    fn the_advice_on_a_silent_peer_depends_on_the_network() {
        for (network, there, elsewhere) in [
            (Network::Roce, "4791", "subnet manager"),
            (Network::InfiniBand, "subnet manager", "4791"),
            (Network::Iwarp, "TCP", "4791"),
        ] {
            let text = explain(WcStatus::RETRY_EXC_ERR, of(WcOpcode::SEND).network(network));
            assert!(text.contains(there) && !text.contains(elsewhere), "{text}");
            assert!(text.contains("the peer is gone"), "{text}");
        }
    }

    #[test]
    fn missing_receives_are_a_cause_of_timeouts_only_on_softroce() {
        for (operation, takes) in [(WcOpcode::SEND, true), (WcOpcode::RDMA_WRITE, true), (WcOpcode::RDMA_READ, false)] {
            let text = explain(WcStatus::RETRY_EXC_ERR, of(operation).network(Network::Roce));
            assert_eq!(text.contains("no receive posted"), takes, "{operation}: {text}");
            for (quirks, may) in [(Quirks::MISSING_RECEIVES_TIME_OUT, takes), (Quirks::empty(), false)] {
                let text = explain(WcStatus::RETRY_EXC_ERR, of(operation).network(Network::Roce).quirks(quirks));
                assert_eq!(text.contains("no receive posted"), may, "{operation}: {text}");
            }
            let text = explain(WcStatus::RETRY_EXC_ERR, of(operation).network(Network::InfiniBand));
            assert!(!text.contains("no receive posted"), "{text}");
        }
    }

    #[test]
    fn receives_and_sends_have_different_causes() {
        let text = explain(WcStatus::LOC_LEN_ERR, of(WcOpcode::RECV));
        assert!(text.contains("posted receive") && !text.contains("max_message_size"), "{text}");
        let text = explain(WcStatus::LOC_LEN_ERR, of(WcOpcode::RECV).qp_type(QueuePairType::UD));
        assert!(text.contains("40 bytes"), "{text}");
        let text = explain(WcStatus::LOC_LEN_ERR, of(WcOpcode::SEND));
        assert!(text.contains("max_message_size") && !text.contains("40 bytes"), "{text}");
        let text = explain(WcStatus::LOC_PROT_ERR, of(WcOpcode::SEND));
        assert!(!text.contains("LOCAL_WRITE"), "a send only reads: {text}");
        assert!(explain(WcStatus::LOC_PROT_ERR, of(WcOpcode::RDMA_READ)).contains("LOCAL_WRITE"));
    }
}
