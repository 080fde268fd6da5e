//! Modifying attributes, with explanations when the kernel refuses.
//!
//! The kernel answers every mistake with `EINVAL`. Everything that can be checked without the device is checked before
//! the call. Limits of the device and of the port are checked after the kernel has refused.

use super::attributes::{AttributeMask, QueuePairAttributes, Transition};
use super::state::{ignored, rule};
use super::{Core, QueuePairState};
use crate::address::AddressError;
use crate::device::TransportType;
use crate::errno::check;
use crate::error::Verb;
use crate::{Context, Errno, Error};

/// Why `ibv_modify_qp(3)` was refused, or would have been.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModifyError {
    /// The state change does not exist.
    #[error("no change from {transition}; the states that it can change to are: {}", reachable(*.transition))]
    InvalidTransition {
        /// Requested change.
        transition: Transition,
    },

    /// The attributes do not match the state change.
    #[error("the attributes do not fit a change from {transition}{}", mismatch(*.missing, *.excess))]
    Attributes {
        /// Requested change.
        transition: Transition,
        /// Required attributes that were not set.
        missing: AttributeMask,
        /// Attributes that were set but are not allowed.
        excess: AttributeMask,
    },

    /// A value is out of range.
    #[error("{attribute} is {value}, but must be {limits}")]
    OutOfRange {
        /// Name of the attribute.
        attribute: &'static str,
        /// Value of the attribute.
        value: u64,
        /// Allowed values.
        limits: String,
    },

    /// The address vector names another port than INIT.
    #[error(
        "the address vector sends from port {address_port}, but the queue pair was assigned to port {port} in INIT"
    )]
    PortMismatch {
        /// Port set at INIT.
        port: u8,
        /// Port of the address vector.
        address_port: u8,
    },

    /// The address vector does not lead to the peer.
    #[error(transparent)]
    Address(#[from] AddressError),

    /// The kernel refused for an unknown reason.
    #[error("ibv_modify_qp from {transition} failed: {errno}; attributes: {attributes:?}")]
    Refused {
        /// Requested change.
        transition: Transition,
        /// Attributes of the call.
        attributes: Box<QueuePairAttributes>,
        /// The errno that the verb returned.
        errno: Errno,
    },
}

impl Core {
    /// Modifies attributes and records the new state.
    pub(crate) fn modify(&self, attributes: &QueuePairAttributes) -> Result<(), Error> {
        let context = self.context();
        context.require_own()?;
        let from = self.state();
        let to = attributes.state().unwrap_or(from);
        let transition = Transition { from, to, qp_type: self.qp_type };
        self.preflight(context, transition, attributes).map_err(Box::new)?;
        if to == QueuePairState::RESET && self.is_polled_by_this_thread() {
            return Err(Error::PollInProgress { verb: Verb::ModifyQp });
        }

        let mut raw = attributes.raw;
        // SAFETY: the queue pair is valid. `raw` is a copy that the call may write.
        let result = unsafe {
            (context.verbs().ibv_modify_qp)(self.as_raw(), &mut raw, attributes.mask.bits() as std::ffi::c_int)
        };
        if let Err(errno) = check(result) {
            return Err(Box::new(self.diagnose(context, transition, attributes, errno)).into());
        }
        if attributes.mask.contains(AttributeMask::PORT) {
            self.set_port(attributes.raw.port_num);
        }
        self.set_state(to);
        Ok(())
    }

    /// Checks that do not need the device.
    fn preflight(
        &self,
        context: &Context,
        transition: Transition,
        attributes: &QueuePairAttributes,
    ) -> Result<(), ModifyError> {
        // Drivers of iWARP devices have their own rules.
        if context.transport_type() == TransportType::IB {
            check_table(transition, attributes.mask)?;
        }
        check_ranges(context, attributes)?;
        if let Some(address) = attributes.address() {
            let port = attributes.port().unwrap_or(self.port());
            if port != 0 && address.port != port {
                return Err(ModifyError::PortMismatch { port, address_port: address.port });
            }
            address.check_route(context)?;
        }
        Ok(())
    }

    /// Looks for the reason of a failure of the kernel.
    fn diagnose(
        &self,
        context: &Context,
        transition: Transition,
        attributes: &QueuePairAttributes,
        errno: Errno,
    ) -> ModifyError {
        let unreachable = match attributes.address().and_then(|address| address.diagnose_route(context, errno)) {
            Some((error, true)) => return error.into(),
            Some((error, false)) => Some(error),
            None => None,
        };
        if errno.0 == libc::EINVAL {
            if let Err(error) = self.check_port_limits(context, attributes) {
                return error;
            }
            // Everything else is right, so the route must be the reason.
            if let Some(error) = unreachable {
                return error.into();
            }
        }
        ModifyError::Refused { transition, attributes: Box::new(*attributes), errno }
    }

    fn check_port_limits(&self, context: &Context, attributes: &QueuePairAttributes) -> Result<(), ModifyError> {
        let Ok(port) = context.query_port(attributes.port().unwrap_or(self.port())) else { return Ok(()) };
        if let Some(index) = attributes.pkey_index() {
            let len = port.pkey_table_len();
            in_range("pkey_index", index.into(), 0, u64::from(len.saturating_sub(1)))?;
        }
        if let Some(mtu) = attributes.path_mtu() {
            if mtu > port.max_mtu() {
                let limits = format!("at most the port's max_mtu of {} bytes", port.max_mtu());
                return Err(ModifyError::OutOfRange { attribute: "path_mtu", value: u32::from(mtu).into(), limits });
            }
        }
        Ok(())
    }
}

fn check_table(transition: Transition, mask: AttributeMask) -> Result<(), ModifyError> {
    let Transition { from, to, qp_type } = transition;
    let Some(rule) = rule(from, to, qp_type) else {
        return match qp_type {
            // The table does not cover this type: the driver decides.
            super::QueuePairType::DRIVER => Ok(()),
            _ => Err(ModifyError::InvalidTransition { transition }),
        };
    };
    let set = mask - ignored(qp_type);
    let missing = rule.required - set;
    let excess = set - rule.required - rule.optional;
    if missing.is_empty() && excess.is_empty() {
        return Ok(());
    }
    Err(ModifyError::Attributes { transition, missing, excess })
}

fn check_ranges(context: &Context, attributes: &QueuePairAttributes) -> Result<(), ModifyError> {
    const PSN: u64 = 0xff_ffff;
    let device = context.attributes();
    let ports = u64::from(device.ports());
    let ranges = [
        ("port", attributes.port().map(u64::from), 1, ports),
        ("port of the address vector", attributes.address().map(|address| address.port.into()), 1, ports),
        ("sl of the address vector", attributes.address().map(|address| address.sl.into()), 0, 15),
        ("timeout", attributes.timeout().map(u64::from), 0, 31),
        ("retry_count", attributes.retry_count().map(u64::from), 0, 7),
        ("rnr_retry", attributes.rnr_retry().map(u64::from), 0, 7),
        ("min_rnr_timer", attributes.min_rnr_timer().map(u64::from), 0, 31),
        ("rq_psn", attributes.rq_psn().map(u64::from), 0, PSN),
        ("sq_psn", attributes.sq_psn().map(u64::from), 0, PSN),
        ("dest_qp_num", attributes.dest_qp_num().map(u64::from), 0, PSN),
        ("path_mtu (its code)", attributes.path_mtu().map(|mtu| mtu.code().into()), 1, 5),
        ("max_rd_atomic", attributes.max_rd_atomic().map(u64::from), 0, device.max_qp_init_rd_atom().into()),
        ("max_dest_rd_atomic", attributes.max_dest_rd_atomic().map(u64::from), 0, device.max_qp_rd_atom().into()),
    ];
    ranges
        .into_iter()
        .filter_map(|(name, value, low, high)| Some((name, value?, low, high)))
        .try_for_each(|(name, value, low, high)| in_range(name, value, low, high))
}

fn in_range(attribute: &'static str, value: u64, low: u64, high: u64) -> Result<(), ModifyError> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(ModifyError::OutOfRange { attribute, value, limits: format!("{low} to {high}") })
}

fn reachable(transition: Transition) -> String {
    let states: Vec<String> = QueuePairState::KNOWN
        .iter()
        .filter(|to| rule(transition.from, **to, transition.qp_type).is_some())
        .map(ToString::to_string)
        .collect();
    let advice = match (transition.from, transition.to) {
        (QueuePairState::RTR | QueuePairState::RTS, QueuePairState::RTR) => {
            "; it is already connected: to connect again, move it to RESET, or build a new endpoint"
        }
        _ => "",
    };
    states.join(", ") + advice
}

fn mismatch(missing: AttributeMask, excess: AttributeMask) -> String {
    let mut text = String::new();
    if !missing.is_empty() {
        text += &format!("; missing: {missing}");
    }
    if !excess.is_empty() {
        text += &format!("; not allowed: {excess}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::QueuePairType;

    fn transition(from: QueuePairState, to: QueuePairState) -> Transition {
        Transition { from, to, qp_type: QueuePairType::RC }
    }

    #[test]
    fn the_error_names_missing_and_excess_attributes() {
        let change = transition(QueuePairState::RESET, QueuePairState::INIT);
        let mask = AttributeMask::STATE | AttributeMask::PORT | AttributeMask::PKEY_INDEX | AttributeMask::SQ_PSN;
        let error = check_table(change, mask).unwrap_err().to_string();
        assert_eq!(
            error,
            "the attributes do not fit a change from RESET to INIT of an RC queue pair; missing: ACCESS_FLAGS; not \
             allowed: SQ_PSN"
        );
    }

    #[test]
    fn the_error_of_an_invalid_transition_lists_the_valid_ones() {
        let change = transition(QueuePairState::INIT, QueuePairState::RTS);
        let error = check_table(change, AttributeMask::STATE).unwrap_err().to_string();
        assert_eq!(
            error,
            "no change from INIT to RTS of an RC queue pair; the states that it can change to are: RESET, INIT, RTR, ERR"
        );
    }

    #[test]
    fn attributes_that_uverbs_ignores_are_accepted_on_xrc_queue_pairs() {
        let change =
            Transition { from: QueuePairState::INIT, to: QueuePairState::RTR, qp_type: QueuePairType::XRC_SEND };
        let path = AttributeMask::AV | AttributeMask::PATH_MTU | AttributeMask::RQ_PSN | AttributeMask::DEST_QPN;
        let mask = AttributeMask::STATE | path | AttributeMask::MIN_RNR_TIMER | AttributeMask::MAX_DEST_RD_ATOMIC;
        check_table(change, mask).unwrap();
        let rc = Transition { qp_type: QueuePairType::UC, ..change };
        assert!(check_table(rc, mask).is_err());
    }
}
