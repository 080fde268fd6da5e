//! `cargo xtask bench pingpong`: the example rc_pingpong compared with its C original.

use anyhow::{Context, Result, bail};

use super::series::Series;
use crate::pair::{self, End};
use crate::pingpong::{self, Program};
use crate::softroce::{self, Options, Passthrough};

/// Compare the example rc_pingpong with rdma-core's ibv_rc_pingpong, run alternately in one guest
///
/// Prints the time of one iteration (a round trip) as each program's client reports it. If the machine is not idle,
/// compare the best times.
///
/// With --count-instructions, times are instruction counts of both ends and the kernel, 1000 instructions to the
/// microsecond, and they are reproducible. The guest then has one processor: pass `-- -e`, so that one end sleeps while
/// the other works.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    softroce: Options,
    /// Number of runs of each program
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pairs: u32,
    /// Options for both programs, such as `-e` for events or `-s 65536` for the message size
    #[arg(last = true, value_name = "OPTIONS")]
    options: Vec<String>,
}

pub(crate) fn main(args: &Args) -> Result<i32> {
    pingpong::build()?;
    let mut command = vec![softroce::THIS_PROGRAM.to_owned(), inside::ARGUMENT.to_owned(), args.pairs.to_string()];
    command.extend(args.options.iter().cloned());
    let ending = softroce::run(&command, &args.softroce, &mut Passthrough)?;
    Ok(ending.status())
}

/// The part that runs on the host or guest with the device.
pub(crate) mod inside {
    use super::{Context, Program, Result, Series, bail, measure};

    /// First argument of this program that selects this part.
    pub(crate) const ARGUMENT: &str = "run-bench-pingpong";

    pub(crate) fn main(words: &[String]) -> Result<i32> {
        let [pairs, options @ ..] = words else { bail!("no number of pairs") };
        let pairs: u32 = pairs.parse()?;
        let (mut c, mut rust) = (Series::default(), Series::default());
        println!("pair          C  rdma-safe   usec/iter");
        for pair in 1..=pairs {
            // The order alternates so that drift affects both programs equally.
            let order = [Program::C, Program::Rust];
            let mut times = [0.0; 2];
            for turn in 0..2 {
                let which = (turn + pair as usize) % 2;
                times[which] =
                    measure(order[which], options).with_context(|| format!("{:?} in pair {pair}", order[which]))?;
            }
            println!("{pair:4} {:10.2} {:10.2}", times[0], times[1]);
            c.push(times[0]);
            rust.push(times[1]);
        }
        println!("\nusec/iter         min     median        max");
        println!("C          {c}");
        println!("rdma-safe  {rust}");
        println!("\nbest of each, rdma-safe / C: {:.3}", rust.min() / c.min());
        Ok(0)
    }
}

/// The time of one iteration, as the client of `program` reports it.
fn measure(program: Program, options: &[String]) -> Result<f64> {
    let command = |end| program.command(end, options);
    let lines = pair::client_output(command(End::Server)?, command(End::Client)?)?;
    let time = lines.iter().find_map(|line| microseconds(line)?.parse().ok());
    time.with_context(|| format!("the client reported no time:\n  {}", lines.join("\n  ")))
}

/// The time in a line such as `1000 iters in 0.17 seconds = 165.32 usec/iter`: here 165.32.
pub(super) fn microseconds(line: &str) -> Option<&str> {
    Some(line.strip_suffix(" usec/iter")?.rsplit_once("= ")?.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_read_from_the_line_of_iterations() {
        assert_eq!(microseconds("1000 iters in 0.17 seconds = 165.32 usec/iter"), Some("165.32"));
        assert_eq!(microseconds("8192000 bytes in 0.17 seconds = 396.41 Mbit/sec"), None);
    }
}
