//! Fault injection: drops, duplicates, reorders, corrupts and delays packets. A seed can be replayed.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::random::Random;

/// Faults that the network injects into sent packets.
///
/// The text form, also used by the environment variable `RDMA_SOFT_FAULTS`, is
/// `seed=7,drop=0.01,dup=0.001,reorder=0.01,corrupt=0.0001,delay=50us`, in any order, each part optional. Shares are numbers
/// from 0 to 1. A delay has the unit `ns`, `us`, `ms` or `s` and applies to every packet. With `only=cm` the faults apply to the
/// messages of the connection manager only.
///
/// ```
/// use rdma_soft::faults::Faults;
///
/// let faults = Faults::default().with_seed(7).with_drop(0.01);
/// assert_eq!(faults, "seed=7,drop=0.01".parse()?);
/// # Ok::<(), rdma_soft::faults::FaultsError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Debug, Default)]
#[non_exhaustive]
pub struct Faults {
    /// Seed of the random numbers. The same seed injects the same faults into the same packets.
    pub seed: u64,
    /// Share of packets that are lost.
    pub drop: f64,
    /// Share of packets that arrive twice.
    pub dup: f64,
    /// Share of packets that later packets overtake.
    pub reorder: f64,
    /// Share of packets with one flipped bit.
    pub corrupt: f64,
    /// Additional delay of each packet.
    pub delay: Duration,
    /// Whether the faults apply to the messages of the connection manager only, and not to data.
    pub only_cm: bool,
}

/// Why a text or a value is not valid for [`Faults`].
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FaultsError {
    /// The text names an unknown fault.
    #[error(
        "unknown fault {0:?}: use seed, drop, dup, reorder, corrupt, delay and only, as in `seed=7,drop=0.01,delay=50us`"
    )]
    Name(String),
    /// A value has the wrong format or is out of range.
    #[error("{name}={value}: {expected}")]
    Value {
        /// Name of the fault.
        name: &'static str,
        /// Value as given.
        value: String,
        /// Expected format or range.
        expected: &'static str,
    },
}

const SHARE_RANGE: &str = "a share of packets is a number from 0 to 1";
const DELAY_FORMAT: &str = "a delay is a whole number with a unit (ns, us, ms or s), at most 10 s";

/// Maximum delay.
const MAX_DELAY: Duration = Duration::from_secs(10);

impl Faults {
    /// Sets [`seed`](Faults::seed).
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets [`drop`](Faults::drop).
    #[must_use]
    pub fn with_drop(mut self, drop: f64) -> Self {
        self.drop = drop;
        self
    }

    /// Sets [`dup`](Faults::dup).
    #[must_use]
    pub fn with_dup(mut self, dup: f64) -> Self {
        self.dup = dup;
        self
    }

    /// Sets [`reorder`](Faults::reorder).
    #[must_use]
    pub fn with_reorder(mut self, reorder: f64) -> Self {
        self.reorder = reorder;
        self
    }

    /// Sets [`corrupt`](Faults::corrupt).
    #[must_use]
    pub fn with_corrupt(mut self, corrupt: f64) -> Self {
        self.corrupt = corrupt;
        self
    }

    /// Sets [`delay`](Faults::delay).
    #[must_use]
    pub fn with_delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Sets [`only_cm`](Faults::only_cm).
    #[must_use]
    pub fn with_only_cm(mut self, only_cm: bool) -> Self {
        self.only_cm = only_cm;
        self
    }

    /// Checks that the shares are from 0 to 1 and the delay is at most 10 s.
    ///
    /// # Errors
    /// [`FaultsError::Value`] for the first field that is out of range.
    pub fn check(&self) -> Result<(), FaultsError> {
        let Faults { drop, dup, reorder, corrupt, delay, .. } = *self;
        for (name, share) in [("drop", drop), ("dup", dup), ("reorder", reorder), ("corrupt", corrupt)] {
            if !(0.0..=1.0).contains(&share) {
                return Err(FaultsError::Value { name, value: share.to_string(), expected: SHARE_RANGE });
            }
        }
        if delay > MAX_DELAY {
            return Err(FaultsError::Value { name: "delay", value: format!("{delay:?}"), expected: DELAY_FORMAT });
        }
        Ok(())
    }
}

impl FromStr for Faults {
    type Err = FaultsError;

    fn from_str(text: &str) -> Result<Self, FaultsError> {
        let mut faults = Faults::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let (name, value) = (name.trim(), value.trim());
            let refused = |name, expected| FaultsError::Value { name, value: value.to_owned(), expected };
            let share = |name| match value.parse() {
                Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
                _ => Err(refused(name, SHARE_RANGE)),
            };
            match name {
                "seed" => faults.seed = value.parse().map_err(|_| refused("seed", "a seed is a whole number"))?,
                "drop" => faults.drop = share("drop")?,
                "dup" => faults.dup = share("dup")?,
                "reorder" => faults.reorder = share("reorder")?,
                "corrupt" => faults.corrupt = share("corrupt")?,
                "only" if value == "cm" => faults.only_cm = true,
                "only" => return Err(refused("only", "use cm, for messages of the connection manager")),
                "delay" => faults.delay = delay(value).ok_or_else(|| refused("delay", DELAY_FORMAT))?,
                _ => return Err(FaultsError::Name(name.to_owned())),
            }
        }
        Ok(faults)
    }
}

fn delay(text: &str) -> Option<Duration> {
    let (number, unit) = text.split_at(text.find(|letter: char| !letter.is_ascii_digit())?);
    let nanoseconds = match unit {
        "ns" => 1,
        "us" => 1000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        _ => return None,
    };
    let delay = Duration::from_nanos(number.parse::<u64>().ok()?.checked_mul(nanoseconds)?);
    (delay <= MAX_DELAY).then_some(delay)
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Faults { seed, drop, dup, reorder, corrupt, delay, only_cm } = self;
        let delay = delay.as_nanos();
        write!(f, "seed={seed},drop={drop},dup={dup},reorder={reorder},corrupt={corrupt},delay={delay}ns")?;
        if *only_cm { f.write_str(",only=cm") } else { Ok(()) }
    }
}

/// Draws the faults of each packet.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub struct Injector {
    faults: Faults,
    random: Random,
}

/// Faults of one packet.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fate {
    /// Number of copies that arrive: 0, 1 or 2.
    pub copies: u8,
    /// Number of later packets that overtake it.
    pub overtaken_by: u8,
    /// Additional delay.
    pub delay: Duration,
}

impl Injector {
    /// Starts with the seed of `faults`.
    #[must_use]
    pub fn new(faults: Faults) -> Self {
        Injector { faults, random: Random(faults.seed) }
    }

    /// Draws the faults of the next packet. Corrupts the packet in place.
    pub fn next(&mut self, packet: &mut [u8]) -> Fate {
        let Faults { drop, dup, reorder, corrupt, delay, only_cm, .. } = self.faults;
        if only_cm && !is_mad(packet) {
            return Fate { copies: 1, overtaken_by: 0, delay: Duration::ZERO };
        }
        // Draw all numbers for each packet, so that one share does not affect the other faults.
        let [is_lost, is_doubled, is_overtaken, is_damaged] =
            [drop, dup, reorder, corrupt].map(|share| self.random.chance(share));
        let (by, bit) = (self.random.next(), self.random.next());
        if is_damaged && !packet.is_empty() {
            let bit = bit % (8 * packet.len() as u64);
            packet[(bit / 8) as usize] ^= 1 << (bit % 8);
        }
        let copies = match (is_lost, is_doubled) {
            (true, _) => 0,
            (false, true) => 2,
            (false, false) => 1,
        };
        Fate { copies, overtaken_by: if is_overtaken { 1 + (by % 4) as u8 } else { 0 }, delay }
    }
}

/// Whether a packet is for queue pair 1, which only gets messages of the connection manager.
fn is_mad(packet: &[u8]) -> bool {
    // The destination is in the last three bytes of the second word of the base transport header.
    packet.get(5..8) == Some(&[0, 0, 1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_parse_and_print() {
        let text = "seed=7,drop=0.01,dup=0.001,reorder=0.01,corrupt=0.0001,delay=50us";
        let faults: Faults = text.parse().unwrap();
        let expected = Faults {
            seed: 7,
            drop: 0.01,
            dup: 0.001,
            reorder: 0.01,
            corrupt: 0.0001,
            delay: Duration::from_micros(50),
            only_cm: false,
        };
        assert_eq!(faults, expected);
        let only_cm: Faults = "drop=1,only=cm".parse().unwrap();
        assert_eq!(only_cm.to_string().parse(), Ok(only_cm));
        assert_eq!(faults.to_string().parse(), Ok(faults));
        assert_eq!("".parse(), Ok(Faults::default()));
        assert_eq!(
            " drop=1 , delay=2ms,".parse::<Faults>().map(|faults| (faults.drop, faults.delay.as_millis())),
            Ok((1.0, 2))
        );
    }

    #[test]
    fn an_invalid_fault_is_named_in_the_error() {
        for (text, expected) in [
            ("loss=1", "unknown fault \"loss\""),
            ("only=udp", "only=udp: use cm"),
            ("drop", "drop=: a share"),
            ("drop =2", "drop=2: a share"),
            ("drop=2", "drop=2: a share"),
            ("dup=-0.1", "dup=-0.1: a share"),
            ("reorder=NaN", "reorder=NaN: a share"),
            ("corrupt=", "corrupt=: a share"),
            ("seed=x", "seed=x: a seed"),
            ("delay=5", "delay=5: a delay"),
            ("delay=us", "delay=us: a delay"),
            ("delay=11s", "delay=11s: a delay"),
            ("delay=99999999999999999999s", "a delay"),
        ] {
            let error = text.parse::<Faults>().unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn the_same_seed_causes_the_same_faults() {
        let fates = |seed| {
            let mut injector =
                Injector::new(Faults { seed, drop: 0.1, dup: 0.1, reorder: 0.1, corrupt: 0.1, ..Faults::default() });
            (0..if cfg!(miri) { 50 } else { 1000 })
                .map(|_| {
                    let mut packet = [0; 64];
                    (injector.next(&mut packet), packet)
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(fates(7), fates(7));
        assert_ne!(fates(7), fates(8));
    }

    #[test]
    #[cfg_attr(miri, ignore = "slow arithmetic")]
    fn faults_occur_at_their_shares() {
        const PACKETS: usize = 100_000;
        let faults = Faults { seed: 1, drop: 0.05, dup: 0.02, reorder: 0.03, corrupt: 0.01, ..Faults::default() };
        let mut injector = Injector::new(faults);
        let (mut lost, mut doubled, mut overtaken, mut damaged) = (0, 0, 0, 0);
        for _ in 0..PACKETS {
            let mut packet = [0_u8; 100];
            let fate = injector.next(&mut packet);
            lost += usize::from(fate.copies == 0);
            doubled += usize::from(fate.copies == 2);
            overtaken += usize::from(fate.overtaken_by > 0);
            let bits: u32 = packet.iter().map(|byte| byte.count_ones()).sum();
            assert!(bits <= 1);
            damaged += usize::from(bits == 1);
        }
        for (count, share) in [(lost, 0.05), (doubled, 0.02 * 0.95), (overtaken, 0.03), (damaged, 0.01)] {
            let expected = share * PACKETS as f64;
            assert!((count as f64 - expected).abs() < expected / 5.0, "{count}, not about {expected}");
        }
        let all = Faults { drop: 1.0, ..Faults::default() };
        assert!((0..100).all({
            let mut injector = Injector::new(all);
            move |_| injector.next(&mut []).copies == 0
        }));
        let mut only_cm = Injector::new(Faults { only_cm: true, ..all });
        let [data, mad] = [2, 1].map(|qp| only_cm.next(&mut [0, 0, 0, 0, 0, 0, 0, qp]).copies);
        assert_eq!((data, mad), (1, 0));
        let none = Injector::new(Faults::default()).next(&mut [1]);
        assert_eq!(none, Fate { copies: 1, overtaken_by: 0, delay: Duration::ZERO });
    }
}
