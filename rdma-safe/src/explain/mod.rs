//! Why work and calls fail, in words.

mod causes;
mod errno;

use std::fmt;

pub(crate) use errno::{advice, advice_on_opening};

use crate::{
    CompletionError, Context, FailedWork, LinkLayer, Operation, PortState, QueuePair, QueuePairType, Quirks, Result,
    TransportType, WcOpcode, WcStatus,
};

/// What carries the packets of a port.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Network {
    /// InfiniBand: a subnet manager gives out addresses, LIDs.
    InfiniBand,
    /// RDMA over converged Ethernet: addressed by GID, over UDP port 4791 or, in version 1, right in Ethernet frames.
    Roce,
    /// iWARP: over TCP.
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

/// What is known of work that failed: narrows down what [`CompletionError::explain_as`] says.
///
/// A failed completion itself does not say which operation it was of: on errors its opcode is not valid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[must_use]
pub struct Circumstances {
    operation: Option<WcOpcode>,
    qp_type: Option<QueuePairType>,
    network: Option<Network>,
    quirks: Option<Quirks>,
}

impl Circumstances {
    /// Which operation it was; of a receive, [`WcOpcode::RECV`].
    pub fn operation(mut self, operation: WcOpcode) -> Self {
        self.operation = Some(operation);
        self
    }

    /// Deviations of its device: [`Context::quirks`].
    pub fn quirks(mut self, quirks: Quirks) -> Self {
        self.quirks = Some(quirks);
        self
    }

    /// Type of its queue pair.
    pub fn qp_type(mut self, qp_type: QueuePairType) -> Self {
        self.qp_type = Some(qp_type);
        self
    }

    /// What its packets went over: see [`Context::network`].
    pub fn network(mut self, network: Network) -> Self {
        self.network = Some(network);
        self
    }

    /// Whether it is one of these, or not known.
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

impl fmt::Display for Circumstances {
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

/// Why work failed: its likely causes, and what its queue pair says that bears on them. Prints as one line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Explanation {
    error: CompletionError,
    circumstances: Circumstances,
    causes: Vec<&'static str>,
    facts: Vec<String>,
}

impl Explanation {
    fn new(error: CompletionError, circumstances: Circumstances) -> Self {
        let causes = causes::of(error.status, &circumstances);
        Explanation { error, circumstances, causes, facts: Vec::new() }
    }

    /// What failed, with the vendor's code.
    #[must_use]
    pub fn error(&self) -> CompletionError {
        self.error
    }

    /// What was known.
    pub fn circumstances(&self) -> Circumstances {
        self.circumstances
    }

    /// Likely causes, likeliest first, each with what to look at or to change.
    #[must_use]
    pub fn causes(&self) -> &[&'static str] {
        &self.causes
    }

    /// What the queue pair and its port say that bears on it, such as the peer's address; empty where nobody was asked.
    #[must_use]
    pub fn facts(&self) -> &[String] {
        &self.facts
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CompletionError { status, vendor_error, .. } = self.error;
        write!(f, "{}: {status} (vendor error {vendor_error:#x})", self.circumstances)?;
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
    /// Its likely causes, whatever it was of. [`QueuePair::explain`] and [`Endpoint::explain`](crate::Endpoint::explain) know more.
    #[must_use]
    pub fn explain(&self) -> Explanation {
        self.explain_as(Circumstances::default())
    }

    /// As [`CompletionError::explain`], of work of which something is known.
    #[must_use]
    pub fn explain_as(&self, circumstances: Circumstances) -> Explanation {
        Explanation::new(*self, circumstances)
    }
}

impl FailedWork {
    /// Its likely causes. [`Endpoint::explain`](crate::Endpoint::explain) knows more.
    #[must_use]
    pub fn explain(&self) -> Explanation {
        self.error().explain_as(Circumstances::default().operation(opcode(self.0.operation)))
    }

    /// By what the queue pair says, whose work it was.
    pub(crate) fn explain_by(&self, qp: &QueuePair) -> Explanation {
        let explanation = qp.explain(&self.error(), opcode(self.0.operation));
        match self.0.exceeded_share() {
            None => explanation,
            Some(_) => Explanation { causes: vec![EXCEEDED_SHARE], ..explanation },
        }
    }
}

const EXCEEDED_SHARE: &str = "the peer has more messages waiting than EndpointBuilder::receive_share: it keeps more requests \
     unanswered than the protocol allows, or the share is too small";

impl QueuePair {
    /// Why work of this queue pair failed, which was an `operation`. It asks the queue pair and its port, and so takes system
    /// calls.
    ///
    /// ```no_run
    /// # use rdma_safe::{CompletionQueue, QueuePair, WcOpcode};
    /// # fn example(cq: &mut CompletionQueue, qp: &QueuePair) -> rdma_safe::Result<()> {
    /// let mut poll = cq.poll();
    /// while let Some(completion) = poll.next()? {
    ///     if let Err(error) = completion.ok() {
    ///         // The program knows what it has posted under that identifier.
    ///         eprintln!("{}", qp.explain(&error, WcOpcode::RDMA_WRITE));
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn explain(&self, error: &CompletionError, operation: WcOpcode) -> Explanation {
        let mut circumstances = Circumstances::default().operation(operation).qp_type(self.qp_type());
        circumstances.quirks = Some(self.context().quirks());
        let queried = self.query().ok();
        let port = queried.as_ref().and_then(|attributes| attributes.port()).filter(|port| *port != 0);
        circumstances.network = port.and_then(|port| self.context().network(port).ok().flatten());
        let mut explanation = error.explain_as(circumstances);
        let unanswered = matches!(error.status, WcStatus::RETRY_EXC_ERR | WcStatus::RNR_RETRY_EXC_ERR);
        let (Some(attributes), true) = (queried, unanswered) else { return explanation };
        let facts = &mut explanation.facts;
        if let Some(number) = attributes.dest_qp_num() {
            facts.push(format!("peer: queue pair {number:#08x}"));
        }
        match attributes.address() {
            Some(crate::AddressVector { route: Some(route), .. }) => {
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
    /// What carries the packets of `port`; `None` where verbs has no name for it.
    ///
    /// # Errors
    /// Those of [`Context::query_port`].
    pub fn network(&self, port: u8) -> Result<Option<Network>> {
        let link_layer = self.query_port(port)?.link_layer();
        Ok(Network::of(self.transport_type(), Some(link_layer)))
    }
}

/// One that stands for the operation.
fn opcode(operation: Operation) -> WcOpcode {
    match operation {
        Operation::Send => WcOpcode::SEND,
        Operation::Write => WcOpcode::RDMA_WRITE,
        Operation::Read => WcOpcode::RDMA_READ,
        Operation::Atomic => WcOpcode::FETCH_ADD,
        Operation::Receive => WcOpcode::RECV,
        Operation::ReceiveWrite => WcOpcode::RECV_RDMA_WITH_IMM,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explain(status: WcStatus, circumstances: Circumstances) -> String {
        let error = CompletionError { status, vendor_error: 0x51, wr_id: 7, qp_num: None };
        error.explain_as(circumstances).to_string()
    }

    fn of(operation: WcOpcode) -> Circumstances {
        Circumstances::default().operation(operation)
    }

    #[test]
    #[cfg_attr(miri, ignore = "takes minutes, and there is nothing unsafe in it")]
    fn every_status_has_a_cause_whatever_is_known() {
        for status in WcStatus::KNOWN.iter().copied().chain([WcStatus(200)]) {
            for operation in WcOpcode::KNOWN.iter().copied().map(Some).chain([None]) {
                for qp_type in QueuePairType::KNOWN.iter().copied().map(Some).chain([None]) {
                    for network in [None, Some(Network::InfiniBand), Some(Network::Roce), Some(Network::Iwarp)] {
                        let circumstances = Circumstances { operation, qp_type, network, quirks: None };
                        let error = CompletionError { status, vendor_error: 0, wr_id: 0, qp_num: None };
                        let explanation = error.explain_as(circumstances);
                        assert!(!explanation.causes().is_empty(), "{status}: {circumstances}");
                        let mut causes = explanation.causes().to_vec();
                        causes.sort_unstable();
                        causes.dedup();
                        assert_eq!(causes.len(), explanation.causes().len(), "{status}: {circumstances}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_line_says_what_failed_on_what_and_why() {
        let known = of(WcOpcode::RDMA_WRITE).qp_type(QueuePairType::RC).network(Network::Roce);
        let text = explain(WcStatus::REM_ACCESS_ERR, known);
        let expected =
            "RDMA_WRITE on an RC queue pair over RoCE: remote access error (vendor error 0x51): the rkey is ";
        assert!(text.starts_with(expected), "{text}");
        assert!(!text.contains('\n'));
        let error = CompletionError { status: WcStatus::SUCCESS, vendor_error: 0, wr_id: 1, qp_num: None };
        assert_eq!(error.explain().to_string(), "work: success (vendor error 0x0): the work is done");
    }

    #[test]
    fn the_right_that_is_missing_is_that_of_the_operation() {
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
    fn a_peer_that_does_not_answer_is_looked_for_where_its_network_has_it() {
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
    fn a_peer_without_receives_that_softroce_takes_for_gone_is_named_for_what_takes_a_receive() {
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
    fn a_receive_is_not_explained_by_what_only_sends_do() {
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
