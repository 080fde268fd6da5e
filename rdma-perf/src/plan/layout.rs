//! Sizes of a test's memory and its division into slots.

use super::{Plan, Role};
use crate::units::amount;

/// Alignment of messages: a cache line.
const CACHE_LINE: u64 = 64;
/// Memory that messages of up to half this size cycle through, so that successive messages use different cache lines.
/// perftest's `cycle_buffer`.
const CYCLE_BUFFER: u64 = 4096;

/// Division of one queue pair's memory.
///
/// ```text
/// sends: slot 0, 1, …   receives, and target of the peer: slot 0, 1, …
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Layout {
    /// Bytes of the send buffer.
    pub(crate) send_area: u64,
    /// Bytes of the buffer for receives and for the peer's operations.
    pub(crate) target_area: u64,
    /// Bytes of one receive.
    pub(crate) receive_len: u64,
    /// Number of receives with memory of their own.
    pub(crate) receive_slots: u64,
}

impl Layout {
    /// The layout of an end that both sends and receives.
    pub(crate) fn of(plan: &Plan) -> Self {
        let largest = plan.sizes.iter().copied().max().unwrap_or(1);
        let area = plan.sizes.iter().map(|size| slots(*size) * stride(*size)).max().unwrap_or(CACHE_LINE);
        let received = largest + plan.transport.receive_header();
        let receive_len = stride(received);
        let receive_slots = match plan.takes_receives() {
            false => 0,
            // With `--validate` no message may overwrite an earlier one before it is compared.
            true if plan.validate => plan.rx_depth.into(),
            true => slots(received),
        };
        Layout { send_area: area, target_area: area.max(receive_slots * receive_len), receive_len, receive_slots }
    }

    /// The layout of one end, without the buffers it does not use.
    pub(crate) fn of_role(plan: &Plan, role: Role) -> Self {
        let mut layout = Layout::of(plan);
        if !plan.sends(role) {
            layout.send_area = CACHE_LINE;
        }
        if !plan.is_sent_to(role) {
            layout.target_area = CACHE_LINE;
        }
        layout
    }

    /// Approximate memory of a test at one end, in bytes.
    pub(crate) fn total(plan: &Plan, role: Role) -> u64 {
        /// Approximate size of a work request in this process and in the provider's rings.
        const WORK_REQUEST: u64 = 512;
        /// Sizes of a huge page and of an ordinary one.
        const HUGE: u64 = 2 << 20;
        const PAGE: u64 = 4096;

        let layout = Layout::of_role(plan, role);
        let page = if plan.huge_pages { HUGE } else { PAGE };
        let area = |part: u64| part.saturating_mul(plan.qps.into()).next_multiple_of(page);
        let buffers = area(layout.send_area).saturating_add(area(layout.target_area));
        let work_requests = u64::from(plan.tx_depth) + u64::from(plan.rx_depth) + u64::from(plan.post_list);
        let queues = work_requests * WORK_REQUEST * u64::from(plan.qps);
        buffers.saturating_add(queues).saturating_mul(plan.threads.into())
    }
}

/// A warning if the test needs more memory in this process than `available`.
pub(crate) fn memory_warning(plan: &Plan, loopback: bool, available: Option<u64>) -> Option<String> {
    let server = if loopback { Layout::total(plan, Role::Server) } else { 0 };
    let memory = Layout::total(plan, Role::Client).saturating_add(server);
    let free = available.filter(|free| memory > *free)?;
    Some(format!(
        "the test takes {} of memory here, but {} are free: the process may be killed; use a smaller --size, --qps or \
         --rx-depth",
        amount(memory),
        amount(free)
    ))
}

/// Distance between two messages of `size` bytes.
pub(crate) fn stride(size: u64) -> u64 {
    size.max(1).next_multiple_of(CACHE_LINE)
}

/// Number of slots that messages of `size` bytes cycle through.
pub(crate) fn slots(size: u64) -> u64 {
    // Larger messages use one slot, as in perftest.
    if stride(size) <= CYCLE_BUFFER / 2 { CYCLE_BUFFER / stride(size) } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::sample;

    fn layout(arguments: &str) -> Layout {
        Layout::of(&sample::plan(arguments))
    }

    #[test]
    fn small_messages_cycle_through_slots_and_large_ones_do_not() {
        assert_eq!((slots(1), slots(64), slots(65), slots(2048), slots(2049)), (64, 64, 32, 2, 1));
        assert_eq!((stride(1), stride(65), stride(1 << 20)), (64, 128, 1 << 20));
    }

    #[test]
    fn memory_does_not_depend_on_the_number_of_messages() {
        let write = layout("write bw h -s 1M -n 1000 -q 64");
        assert_eq!((write.send_area, write.target_area, write.receive_slots), (1 << 20, 1 << 20, 0));
        let plan = sample::plan("write bw h -s 1M -n 1000 -q 64");
        // Buffers of one direction, and the queues.
        let total = [Role::Client, Role::Server].map(|role| Layout::total(&plan, role));
        assert_eq!(total[0], total[1]);
        assert!(((64 << 20)..(100 << 20)).contains(&total[0]), "{total:?}");
        let sweep = layout("write bw h -s 2..8K");
        assert_eq!((sweep.send_area, sweep.target_area), (8192, 8192));
        let send = layout("send bw h -s 64");
        assert_eq!((send.receive_len, send.receive_slots, send.target_area), (64, 64, 4096));
        let validated = layout("send bw h -s 100 --validate -r 10");
        assert_eq!((validated.receive_len, validated.receive_slots, validated.target_area), (128, 10, 4096));
        // The GRH precedes the message.
        let datagrams = layout("send bw h -c UD -s 64");
        assert_eq!((datagrams.receive_len, datagrams.receive_slots, datagrams.target_area), (128, 32, 4096));
        assert_eq!((datagrams.send_area, layout("send bw h -c UD -s 4K").target_area), (4096, 4160));
    }

    #[test]
    fn buffers_beyond_free_memory_cause_a_warning() {
        let plan = sample::plan("write bw host -s 1G");
        assert_eq!(memory_warning(&plan, false, None), None);
        assert_eq!(memory_warning(&plan, false, Some(3 << 30)), None);
        let warning = memory_warning(&plan, false, Some(1 << 30)).unwrap();
        assert!(warning.contains("takes 1 GiB") && warning.contains("1 GiB are free"), "{warning}");
        assert!(memory_warning(&plan, true, Some(3 << 29)).unwrap().contains("takes 2 GiB"));
    }
}
