//! Completion queues.

use anyhow::{Context as _, Result, bail};
use rdma_safe::{CompletionChannel, CompletionQueue, Context, WcFields};

use crate::plan::{Interface, Plan};

pub(crate) fn completion_queue(
    context: &Context,
    plan: &Plan,
    depth: u32,
    channel: Option<&CompletionChannel>,
) -> Result<CompletionQueue> {
    let entries = depth.saturating_mul(plan.qps).max(1);
    let mut cq = context
        .completion_queue(entries)
        .fields(WcFields::BYTE_LEN | WcFields::IMM | WcFields::QP_NUM)
        .classic(plan.poll == Interface::Classic);
    if let Some(channel) = channel {
        cq = cq.channel(channel);
    }
    let cq = cq.build().with_context(|| {
        format!("--qps, --tx-depth and --rx-depth ask for {} times {depth} completions in one queue", plan.qps)
    })?;
    if plan.poll == Interface::Extended && !cq.is_extended() {
        bail!("{} does not poll by ibv_start_poll: leave out --poll extended", context.device_name());
    }
    Ok(cq)
}
