//! The formulas of perftest 4.5 (`print_report_bw`, `print_report_lat`), including their errors, so that results are
//! comparable.

use crate::clock::Clock;
use crate::stats::values::Perftest;

/// Number of longest latencies that perftest leaves out (`LAT_MEASURE_TAIL`).
const TAIL: usize = 2;
/// perftest searches no peak in more iterations than this, because the search is quadratic.
pub(crate) const MAX_PEAK_ITERATIONS: u64 = 20_000;

/// Times at which messages of a bandwidth test were posted and completed, in ticks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timestamps {
    pub(crate) posted: Vec<u64>,
    pub(crate) completed: Vec<u64>,
}

/// perftest's columns of a bandwidth test of `iterations` messages of `size` bytes. `window` is the time of the first
/// post and of the last completion. The peak needs `timestamps`.
pub(crate) fn bandwidth(
    size: u64,
    iterations: u64,
    window: (u64, u64),
    timestamps: Option<&Timestamps>,
    post_list: u32,
    cq_mod: u32,
    clock: Clock,
) -> Perftest {
    const MIB: f64 = 1_048_576.0;
    let hertz = clock.megahertz() * 1e6;
    let ticks = window.1.saturating_sub(window.0).max(1) as f64;
    let per_second = iterations as f64 * hertz / ticks;
    let peak =
        timestamps.and_then(|timestamps| least_ticks_a_message(timestamps, iterations as usize, post_list, cq_mod));
    Perftest::Bandwidth {
        iterations,
        peak: peak.map_or(0.0, |ticks| size as f64 * hertz / ticks as f64 / MIB),
        average: size as f64 * per_second / MIB,
        message_rate: per_second / 1e6,
    }
}

/// The shortest time per message, averaged from any post to any later completion. perftest uses whole ticks.
fn least_ticks_a_message(timestamps: &Timestamps, iterations: usize, post_list: u32, cq_mod: u32) -> Option<u64> {
    let (post_list, cq_mod) = (post_list as usize, cq_mod as usize);
    let Timestamps { posted, completed } = timestamps;
    let count = iterations.min(posted.len()).min(completed.len());
    let average = |first: usize, last: usize| {
        let ticks = completed[last].checked_sub(posted[first])?;
        Some(ticks / (last - first + 1) as u64)
    };
    let mut least = completed.get(count.checked_sub(1)?)?.checked_sub(posted[0])?;
    for first in (0..count).step_by(post_list) {
        let next_signaled = (first + 1).next_multiple_of(cq_mod) - 1;
        for last in (next_signaled..count).step_by(cq_mod) {
            least = average(first, last).map_or(least, |ticks| ticks.min(least));
        }
        // The last message is always signaled.
        if count % cq_mod != 0 {
            least = average(first, count - 1).map_or(least, |ticks| ticks.min(least));
        }
    }
    Some(least.max(1))
}

/// perftest's columns of a latency test, from the times at which messages were posted. Each sample is divided by
/// `divisor`, which is 2 for a ping-pong. `None` if there are too few samples.
pub(crate) fn latency(posted: &[u64], divisor: f64, clock: Clock) -> Option<Perftest> {
    let mut deltas: Vec<u64> = posted.windows(2).map(|pair| pair[1] - pair[0]).collect();
    deltas.sort_unstable();
    let count = deltas.len().checked_sub(TAIL).filter(|count| *count > 0)?;
    let factor = clock.megahertz() * divisor;
    let micros = |ticks: u64| ticks as f64 / factor;
    let average = deltas[..count].iter().map(|ticks| micros(*ticks)).sum::<f64>() / count as f64;
    // perftest keeps the deviation in an `int`, so deviations below a microsecond count as zero.
    let squares: f64 = deltas[..count].iter().map(|ticks| (average - micros(*ticks)).trunc().powi(2)).sum();
    let median = match count % 2 {
        0 => micros(deltas[count / 2 - 1].midpoint(deltas[count / 2])),
        _ => micros(deltas[count / 2]),
    };
    let rank = |share: f64| micros(deltas[(count as f64 * share).ceil() as usize]);
    Some(Perftest::Latency {
        iterations: posted.len() as u64,
        min: micros(deltas[0]),
        // The sample after the longest one that counts.
        max: micros(deltas[count]),
        typical: median,
        average,
        standard_deviation: (squares / count as f64).sqrt(),
        percentile_99: rank(0.99),
        percentile_99_9: rank(0.999),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Timestamps with these microseconds in between.
    fn posted(clock: Clock, micros: &[u64]) -> Vec<u64> {
        let mut now = 1000;
        let mut timestamps = vec![now];
        for micros in micros {
            now += clock.ticks(std::time::Duration::from_micros(*micros));
            timestamps.push(now);
        }
        timestamps
    }

    fn close(ours: f64, expected: f64) -> bool {
        (ours - expected).abs() < 0.01
    }

    #[test]
    fn latency_follows_perftests_formulas() {
        let clock = Clock::nanoseconds();
        // Sorted: 10 × 97, 12, 20, 30, 40. The two longest count only for t_max.
        let mut micros = vec![10; 97];
        micros.extend([40, 12, 30, 20]);
        let Some(Perftest::Latency {
            iterations,
            min,
            max,
            typical,
            average,
            standard_deviation,
            percentile_99,
            percentile_99_9,
        }) = latency(&posted(clock, &micros), 1.0, clock)
        else {
            panic!("no columns")
        };
        assert_eq!(iterations, 102);
        assert!(close(min, 10.0) && close(typical, 10.0));
        assert!(close(max, 30.0), "the second longest: {max}");
        let mean = (970.0 + 12.0 + 20.0) / 99.0;
        assert!(close(average, mean));
        // 12 - 10.12 counts as 1, 20 - 10.12 as 9, and deviations below a microsecond as zero.
        assert!(close(standard_deviation, (82.0_f64 / 99.0).sqrt()), "{standard_deviation}");
        assert!(close(percentile_99, 30.0), "one rank high: {percentile_99}");
        assert!(close(percentile_99_9, 30.0));
    }

    #[test]
    fn the_divisor_halves_all_latencies() {
        let clock = Clock::nanoseconds();
        let Some(Perftest::Latency { typical, .. }) = latency(&posted(clock, &[10, 20, 30, 40]), 2.0, clock) else {
            panic!("no columns")
        };
        assert!(close(typical, 7.5), "the median of 10 and 20, halved: {typical}");
        assert_eq!(latency(&posted(clock, &[1, 2]), 2.0, clock), None);
    }

    #[test]
    fn bandwidth_follows_perftests_formulas() {
        let clock = Clock::nanoseconds();
        // Ten messages of 1 MiB, posted every millisecond. The second signaled one completes faster.
        let posted: Vec<u64> = (0..10).map(|index| index * 1_000_000).collect();
        let mut completed = vec![0; 10];
        (completed[4], completed[9]) = (9_000_000, 10_000_000);
        let timestamps = Timestamps { posted, completed };
        let Perftest::Bandwidth { iterations, peak, average, message_rate } =
            bandwidth(1 << 20, 10, (0, 10_000_000), Some(&timestamps), 1, 5, clock)
        else {
            panic!("no bandwidth")
        };
        assert_eq!(iterations, 10);
        assert!(close(average, 1000.0) && close(message_rate, 0.001));
        // From the fourth post (3 ms) to the last completion: 7 messages in 7 ms. From the first post to the first
        // completion: 5 in 9 ms.
        assert!(close(peak, 1000.0), "{peak}");
    }
}
