//! The steps of a connection, their times, and the table of the times.

use std::fmt::Write as _;
use std::time::Instant;

/// The steps in the order of the table. The instances synchronize by the step numbers of the C program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    FullConnect,
    CreateId,
    Bind,
    ResolveAddress,
    ResolveRoute,
    CreateQp,
    InitAttributes,
    Init,
    RtrAttributes,
    Rtr,
    RtsAttributes,
    Rts,
    Connect,
    Establish,
    Disconnect,
    DestroyId,
    DestroyQp,
}

const NAMES: [&str; Step::COUNT] = [
    "full connect",
    "create id",
    "bind addr",
    "resolve addr",
    "resolve route",
    "create qp",
    "init qp attr",
    "init qp",
    "rtr qp attr",
    "rtr qp",
    "rts qp attr",
    "rts qp",
    "cm connect",
    "establish",
    "disconnect",
    "destroy id",
    "destroy qp",
];

impl Step {
    pub(crate) const COUNT: usize = Step::DestroyQp as usize + 1;
}

/// Start and end of each step, of one connection or of all.
#[derive(Clone, Default, Debug)]
pub(crate) struct Times([(Option<Instant>, Option<Instant>); Step::COUNT]);

impl Times {
    pub(crate) fn begin(&mut self, step: Step) {
        self.0[step as usize].0 = Some(Instant::now());
    }

    pub(crate) fn end(&mut self, step: Step) {
        self.0[step as usize].1 = Some(Instant::now());
    }

    /// Duration of a finished step in microseconds.
    fn micros(&self, step: usize) -> Option<u64> {
        let (Some(begin), Some(end)) = self.0[step] else { return None };
        Some(end.saturating_duration_since(begin).as_micros() as u64)
    }
}

/// Formats the table, for connections with or without queue pairs.
pub(crate) fn table(with_queue_pairs: bool, threads: usize, all: &Times, each: &[Times]) -> String {
    let count = each.len() as u64;
    let kind = if with_queue_pairs { "qp_conn" } else { "cm_conn" };
    let mut text = format!("{kind}        {count:>10}\nthreads        {threads:>10}\n");
    text.push_str("step             avg/conn  total(us)    us/conn    sum(us)    max(us)    min(us)\n");
    for (step, name) in NAMES.iter().enumerate() {
        let total = all.micros(step).unwrap_or(0);
        let durations = || each.iter().filter_map(|times| times.micros(step));
        // Whole connections overlap, so their sum means nothing.
        let sum: u64 = if step == Step::FullConnect as usize { 0 } else { durations().sum() };
        let (max, min) = (durations().max().unwrap_or(0), durations().min().unwrap_or(0));
        let (average, each_average) = (total / count.max(1), sum / count.max(1));
        let _ =
            writeln!(text, "{name:<13}  {average:>10} {total:>10} {each_average:>10} {sum:>10} {max:>10} {min:>10}");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn took(step: Step, micros: u64) -> Times {
        let mut times = Times::default();
        let begin = Instant::now();
        times.0[step as usize] = (Some(begin), Some(begin + Duration::from_micros(micros)));
        times
    }

    #[test]
    fn the_table_has_the_columns_of_c() {
        let each = [took(Step::Connect, 100), took(Step::Connect, 300)];
        let text = table(true, 2, &took(Step::Connect, 310), &each);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "qp_conn                 2");
        assert_eq!(lines[1], "threads                 2");
        assert_eq!(lines[2], "step             avg/conn  total(us)    us/conn    sum(us)    max(us)    min(us)");
        assert_eq!(lines.len(), 3 + Step::COUNT);
        assert_eq!(lines[15], "cm connect            155        310        200        400        300        100");
        assert_eq!(lines[4], "create id               0          0          0          0          0          0");
    }

    #[test]
    fn whole_connections_have_no_sum_and_zero_connections_do_not_divide() {
        let text = table(false, 1, &Times::default(), &[took(Step::FullConnect, 100)]);
        assert!(text.starts_with("cm_conn                 1\n"), "{text}");
        assert!(
            text.contains("full connect            0          0          0          0        100        100\n"),
            "{text}"
        );
        assert!(table(false, 1, &Times::default(), &[]).contains("cm_conn                 0\n"));
    }

    #[test]
    fn step_numbers_are_those_of_c() {
        assert_eq!(
            (Step::FullConnect as u8, Step::Init as u8, Step::Connect as u8, Step::Disconnect as u8),
            (0, 7, 12, 14)
        );
    }
}
