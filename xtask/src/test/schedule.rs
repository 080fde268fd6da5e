//! Which stage runs next, and how long the rest takes.

use std::time::Duration;

use super::stage::Stage;

/// The stages of a run in the order in which they start.
#[derive(Debug)]
pub(super) struct Schedule {
    waiting: Vec<(Stage, Duration)>,
    running: Vec<(Stage, Duration)>,
    jobs: usize,
}

impl Schedule {
    /// Runs `stages`, each with the time that it is expected to take, `jobs` at a time.
    pub(super) fn new(stages: Vec<(Stage, Duration)>, jobs: usize) -> Self {
        Schedule { waiting: stages, running: Vec::new(), jobs }
    }

    /// The next stage that may start now: by [`Stage::priority`], then in order.
    pub(super) fn start_next(&mut self) -> Option<Stage> {
        if self.running.len() >= self.jobs {
            return None;
        }
        let can_start = |stage: Stage| {
            let build_is_done = !self.has_left(Stage::Build);
            let target_is_free = !stage.compiles() || !self.running.iter().any(|(other, _)| other.compiles());
            let guest_is_free = !stage.boots_guests() || !self.running.iter().any(|(other, _)| other.boots_guests());
            (build_is_done || !stage.needs_build()) && target_is_free && guest_is_free
        };
        let ready = self.waiting.iter().enumerate().filter(|(_, (stage, _))| can_start(*stage));
        let (index, _) = ready.min_by_key(|(index, (stage, _))| (stage.priority(), *index))?;
        let next = self.waiting.remove(index);
        self.running.push(next);
        Some(next.0)
    }

    pub(super) fn end(&mut self, stage: Stage) {
        self.running.retain(|(other, _)| *other != stage);
    }

    /// Starts no further stage.
    pub(super) fn cancel(&mut self) {
        self.waiting.clear();
    }

    pub(super) fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    fn has_left(&self, stage: Stage) -> bool {
        self.waiting.iter().chain(&self.running).any(|(other, _)| *other == stage)
    }

    /// Time until the last stage ends, if each takes as long as expected. `elapsed` is the time since the start of a stage.
    pub(super) fn time_left(&self, elapsed: impl Fn(Stage) -> Duration) -> Duration {
        let running = self.running.iter().map(|(stage, expected)| expected.saturating_sub(elapsed(*stage)));
        let left: Vec<Duration> = running.chain(self.waiting.iter().map(|(_, expected)| *expected)).collect();
        let guests = self.waiting.iter().filter(|(stage, _)| stage.boots_guests()).map(|(_, expected)| *expected);
        let longest = left.iter().copied().max().unwrap_or_default().max(guests.sum());
        let sum: Duration = left.iter().sum();
        longest.max(sum / u32::try_from(self.jobs).unwrap_or(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(stages: &[Stage], jobs: usize) -> Schedule {
        Schedule::new(stages.iter().map(|stage| (*stage, Duration::from_secs(60))).collect(), jobs)
    }

    #[test]
    fn tests_wait_for_the_build_and_other_stages_do_not() {
        let mut schedule = schedule(&[Stage::Unit, Stage::Fmt, Stage::Build], 2);
        assert_eq!(schedule.start_next(), Some(Stage::Build), "what others wait for comes first");
        assert_eq!(schedule.start_next(), Some(Stage::Fmt));
        schedule.end(Stage::Fmt);
        assert_eq!(schedule.start_next(), None);
        schedule.end(Stage::Build);
        assert_eq!(schedule.start_next(), Some(Stage::Unit));
    }

    #[test]
    fn the_longest_stages_start_first_but_unit_tests_are_not_kept_waiting() {
        let mut schedule = schedule(&[Stage::Build, Stage::Unit, Stage::Device, Stage::Clippy, Stage::Miri], 2);
        assert_eq!(schedule.start_next(), Some(Stage::Build));
        assert_eq!(schedule.start_next(), Some(Stage::Miri));
        schedule.end(Stage::Build);
        assert_eq!(schedule.start_next(), Some(Stage::Unit));
        schedule.end(Stage::Unit);
        assert_eq!(schedule.start_next(), Some(Stage::Device));
        schedule.end(Stage::Device);
        assert_eq!(schedule.start_next(), Some(Stage::Clippy));
    }

    #[test]
    fn one_guest_runs_beside_one_other_stage() {
        let mut schedule = schedule(&[Stage::Clippy, Stage::Device, Stage::Hosts, Stage::Soft], 2);
        assert_eq!(schedule.start_next(), Some(Stage::Device));
        assert_eq!(schedule.start_next(), Some(Stage::Clippy));
        assert_eq!(schedule.start_next(), None, "two at a time");
        schedule.end(Stage::Clippy);
        assert_eq!(schedule.start_next(), Some(Stage::Soft));
        schedule.end(Stage::Device);
        assert_eq!(schedule.start_next(), Some(Stage::Hosts));
        schedule.end(Stage::Soft);
        schedule.end(Stage::Hosts);
        assert!(schedule.is_idle());
    }

    #[test]
    fn stages_that_compile_into_one_directory_take_turns() {
        let mut schedule = schedule(&[Stage::Clippy, Stage::Docs, Stage::Overhead], 2);
        assert_eq!(schedule.start_next(), Some(Stage::Clippy));
        assert_eq!(schedule.start_next(), Some(Stage::Overhead));
    }

    #[test]
    fn the_time_left_is_that_of_the_longest_stage_or_of_all_jobs() {
        let mut schedule = schedule(&[Stage::Clippy, Stage::Docs, Stage::Unit, Stage::Soft], 2);
        let none = |_| Duration::ZERO;
        assert_eq!(schedule.time_left(none), Duration::from_secs(120));
        schedule.start_next();
        assert_eq!(schedule.time_left(|_| Duration::from_secs(60)), Duration::from_secs(90));
        schedule.cancel();
        assert_eq!(schedule.time_left(none), Duration::from_secs(60));
    }
}
