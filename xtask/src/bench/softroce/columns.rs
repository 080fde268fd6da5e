//! Parses the output of a client: perftest's table, or the last line of a ping-pong.

use std::fmt;

use anyhow::{Context, Result, bail};

use crate::bench::pingpong;

/// Bytes in a megabyte, as perftest counts bandwidth.
const MEGABYTE: f64 = 1_048_576.0;
/// Name of the only column of a ping-pong.
const ITERATION: &str = "usec/iter";

/// Printed figures with the names of their columns, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Columns(pub(super) Vec<(String, Figure)>);

/// A printed number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Figure {
    pub(super) value: f64,
    /// Digits after the decimal point.
    decimals: usize,
}

impl Figure {
    fn parse(text: &str) -> Option<Self> {
        let value = text.parse().ok().filter(|value: &f64| value.is_finite())?;
        Some(Self { value, decimals: text.split_once('.').map_or(0, |(_, fraction)| fraction.len()) })
    }

    /// Whether the number was printed without a decimal point.
    pub(super) fn is_whole(self) -> bool {
        self.decimals == 0
    }

    /// Value of one unit in the last printed digit.
    pub(super) fn unit(self) -> f64 {
        0.1_f64.powi(i32::try_from(self.decimals).unwrap_or(i32::MAX))
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.*}", self.decimals, self.value)
    }
}

impl Columns {
    /// Parses perftest's table: the header line, which begins with ` #bytes`, and the line after it.
    pub(super) fn perftest(lines: &[String]) -> Result<Self> {
        let header = lines.iter().position(|line| line.trim_start().starts_with("#bytes"));
        let header = header.context("no line begins with #bytes")?;
        // Names are separated by at least two spaces, except the first two, and contain single spaces.
        let names = lines[header].replace(" #", "  #").replace('\t', "  ");
        let names: Vec<&str> = names.split("  ").map(str::trim).filter(|name| !name.is_empty()).collect();
        let row = lines.get(header + 1).context("no line follows the one that begins with #bytes")?;
        let figures: Option<Vec<Figure>> = row.split_whitespace().map(Figure::parse).collect();
        match figures {
            Some(figures) if figures.len() == names.len() => {
                Ok(Self(names.into_iter().map(str::to_owned).zip(figures).collect()))
            }
            _ => bail!("expected one number for each of {names:?}, found {row:?}"),
        }
    }

    /// Parses the iteration time of a ping-pong.
    pub(super) fn pingpong(lines: &[String]) -> Result<Self> {
        let time = lines.iter().find_map(|line| Figure::parse(pingpong::microseconds(line)?));
        Ok(Self(vec![(ITERATION.to_owned(), time.context("no line contains the iteration time")?)]))
    }

    /// Column names without units, because the units differ between versions of perftest.
    pub(super) fn names(&self) -> Vec<&str> {
        self.0.iter().map(|(name, _)| name.split('[').next().unwrap_or(name)).collect()
    }

    fn get(&self, name: &str) -> Option<Figure> {
        self.0.iter().find(|(full, _)| full.split('[').next() == Some(name)).map(|(_, figure)| *figure)
    }

    /// Average time of a message in nanoseconds. On a clock that counts instructions, this is the number of instructions.
    ///
    /// This is not the median, because the median would hide costs that only some messages have.
    pub(super) fn nanoseconds(&self) -> Result<f64> {
        if let Some(iteration) = self.get(ITERATION) {
            // An iteration is two messages, there and back.
            return Ok(iteration.value * 1e3 / 2.0);
        }
        if let Some(average) = self.get("t_avg") {
            return Ok(average.value * 1e3);
        }
        let column = |name: &str| self.get(name).with_context(|| format!("no column {name}"));
        let (rate, bandwidth, bytes) = (column("MsgRate")?, column("BW average")?, column("#bytes")?);
        // The number of decimals is fixed, so either figure may have more significant digits than the other.
        let relative = |figure: Figure| figure.unit() / figure.value;
        if relative(rate) <= relative(bandwidth) {
            Ok(1e3 / rate.value)
        } else {
            Ok(bytes.value * 1e9 / (bandwidth.value * MEGABYTE))
        }
    }
}

/// Whether a larger figure in the column `name` is better.
pub(super) fn is_rate(name: &str) -> bool {
    name.starts_with("BW") || name.starts_with("MsgRate")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Output of `ib_send_lat -e` of perftest 6.06.
    const LATENCY: &str = "\
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:09:09:01
---------------------------------------------------------------------------------------
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   \
99% percentile[usec]   99.9% percentile[usec] \n\
 2       1000          29.24          34.20        29.39    	       29.64       	0.14   		30.64   		34.20  
---------------------------------------------------------------------------------------
";
    /// Output of `ib_write_bw` of the same version.
    const BANDWIDTH: &str = "\
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 64         5000             4.13               4.13   		   0.067632
---------------------------------------------------------------------------------------
";
    const LARGE: &str = "\
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      1000             149.28             148.84 		   0.002381
";

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_latency_table_is_parsed() {
        let columns = Columns::perftest(&lines(LATENCY)).unwrap();
        let expected = "#bytes,#iterations,t_min,t_max,t_typical,t_avg,t_stdev,99% percentile,99.9% percentile";
        assert_eq!(columns.names().join(","), expected);
        let figures: Vec<String> = columns.0.iter().map(|(_, figure)| figure.to_string()).collect();
        assert_eq!(figures.join(" "), "2 1000 29.24 34.20 29.39 29.64 0.14 30.64 34.20");
        assert_eq!(columns.nanoseconds().unwrap().round(), 29_640.0);
    }

    #[test]
    fn the_time_of_a_message_comes_from_the_more_precise_figure() {
        let small = Columns::perftest(&lines(BANDWIDTH)).unwrap();
        assert_eq!(small.names(), ["#bytes", "#iterations", "BW peak", "BW average", "MsgRate"]);
        assert_eq!(small.nanoseconds().unwrap().round(), 14_786.0);
        let large = Columns::perftest(&lines(LARGE)).unwrap();
        assert_eq!(large.nanoseconds().unwrap().round(), 419_914.0);
    }

    #[test]
    fn an_iteration_of_a_pingpong_is_two_messages() {
        let text = "8192000 bytes in 0.13 seconds = 513.51 Mbit/sec\n1000 iters in 0.13 seconds = 127.62 usec/iter\n";
        let columns = Columns::pingpong(&lines(text)).unwrap();
        assert_eq!(columns.nanoseconds().unwrap().round(), 63_810.0);
        assert!(Columns::pingpong(&lines("Failed status")).is_err());
    }

    #[test]
    fn a_table_with_a_missing_figure_or_without_rows_is_refused() {
        let header = lines(BANDWIDTH)[1].clone();
        for row in [" 64  5000  4.13  4.13", " 64  5000  4.13  4.13  -nan", "Completion with error"] {
            assert!(Columns::perftest(&[header.clone(), row.to_owned()]).is_err(), "{row}");
        }
        assert!(Columns::perftest(&[header]).is_err());
        assert!(Columns::perftest(&[]).is_err());
    }

    #[test]
    fn the_unit_of_a_figure_is_its_last_digit() {
        assert_eq!(Figure::parse("1000").unwrap().unit(), 1.0);
        assert!((Figure::parse("0.14").unwrap().unit() - 0.01).abs() < 1e-12);
    }
}
