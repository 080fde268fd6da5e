//! Breadth-first search through the states.

use std::collections::{HashSet, VecDeque};
use std::fmt::Write;
use std::hash::{BuildHasherDefault, Hasher};
use std::mem;
use std::time::Instant;

use crate::invariants::{check, is_quiescent};
use crate::support::host::Input;
use crate::support::plant::message;
use crate::world::{Action, Faults, Settings, State, World};

/// What a search has found.
#[derive(Debug)]
pub(crate) struct Report {
    /// The shortest way to a broken rule, as text.
    pub(crate) counterexample: Option<String>,
    pub(crate) states: usize,
    pub(crate) transitions: usize,
    /// Depth of the search.
    pub(crate) depth: u32,
    /// Quiescent states with an established connection, and without one.
    pub(crate) quiescent: [usize; 2],
}

/// One in this many states is run until it is quiescent.
const SETTLED: usize = 32;

/// Most steps until such a run is quiescent.
const MOST_STEPS: usize = 200;

/// A hasher for keys that are hashes.
#[derive(Default)]
struct Same(u64);

impl Hasher for Same {
    fn write(&mut self, _: &[u8]) {}

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Hashes an encoded state. Two of 10⁷ states have the same hash with a probability of 3 · 10⁻⁶.
fn hash(state: &[u32]) -> u64 {
    state.iter().fold(state.len() as u64, |hash, word| {
        let product = u128::from(hash ^ u64::from(*word) ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93_u128;
        product as u64 ^ (product >> 64) as u64
    })
}

/// Searches all states, and prints how many there are.
pub(crate) fn search(name: &str, settings: Settings) -> Report {
    let started = Instant::now();
    let (mut world, first) = World::new(settings);
    let mut report = Report { counterexample: None, states: 0, transitions: 0, depth: 0, quiescent: [0; 2] };
    let mut seen = HashSet::<u64, BuildHasherDefault<Same>>::default();
    // For each state, its predecessor and the step from there.
    let mut ways: Vec<(u32, Action)> = vec![(0, Action::Lose(0))];
    let (mut state, mut next, mut code, mut actions) = (State::default(), State::default(), Vec::new(), Vec::new());
    first.encode(&mut code);
    seen.insert(hash(&code));
    let mut queue = VecDeque::from([(Box::<[u32]>::from(&code[..]), 0_u32, 0_u32)]);
    'search: while let Some((encoded, number, depth)) = queue.pop_front() {
        report.depth = depth;
        state.decode(&encoded);
        actions.clear();
        world.steps(&state, &mut actions);
        world.faults(&state, &mut actions);
        for &action in &actions {
            report.transitions += 1;
            let mut result = world.apply(&state, action, &mut next);
            if result.is_ok() {
                next.encode(&mut code);
                if !seen.insert(hash(&code)) {
                    continue;
                }
                result = check(&world, &next);
            }
            ways.push((number, action));
            if let Err(reason) = result {
                report.counterexample = Some(trace(&mut world, first.clone(), &ways) + &reason);
                break 'search;
            }
            if is_quiescent(&world, &next) {
                let is_empty = [0, 1].iter().all(|host| world.info(&next, *host).host.sessions.is_empty());
                report.quiescent[usize::from(is_empty)] += 1;
            }
            if ways.len() % SETTLED == 0 {
                if let Err(reason) = settle(&mut world, &next) {
                    let way = trace(&mut world, first, &ways);
                    report.counterexample = Some(format!("{way}and then, without another fault: {reason}"));
                    break 'search;
                }
            }
            queue.push_back((Box::from(&code[..]), ways.len() as u32 - 1, depth + 1));
        }
    }
    report.states = ways.len();
    println!(
        "{name}: {} states, {} steps between them, depth {}, {} states of a host, {} quiescent with a connection, \
         {} without, {:.1} s",
        report.states,
        report.transitions,
        report.depth,
        world.host_states(),
        report.quiescent[0],
        report.quiescent[1],
        started.elapsed().as_secs_f64()
    );
    report
}

/// Runs a state without faults until it is quiescent: packets first, then programs, then timers.
///
/// # Errors
/// A text with the broken invariant, or that the run does not end.
fn settle(world: &mut World, from: &State) -> Result<(), String> {
    let mut state = from.clone();
    state.left = Faults::default();
    let (mut next, mut actions) = (State::default(), Vec::new());
    for _ in 0..MOST_STEPS {
        if is_quiescent(world, &state) {
            return Ok(());
        }
        actions.clear();
        world.steps(&state, &mut actions);
        let is_due = |action: &&Action| match action {
            Action::Happen(host, input) => {
                let is_kept = world.keepalives(&state, *host).any(|of| of == **action);
                is_kept
                    || matches!(input, Input::Timer(_))
                    || world.info(&state, (*host).into()).mandatory.contains(input)
            }
            _ => true,
        };
        let action =
            *actions.iter().find(is_due).ok_or("stuck: no step is possible, but the state is not quiescent")?;
        world.apply(&state, action, &mut next)?;
        check(world, &next)?;
        mem::swap(&mut state, &mut next);
    }
    Err(format!("still busy after {MOST_STEPS} steps"))
}

/// Describes the steps to the last state.
fn trace(world: &mut World, first: State, ways: &[(u32, Action)]) -> String {
    let mut actions = Vec::new();
    let mut number = ways.len() - 1;
    while number != 0 {
        let (before, action) = ways[number];
        actions.push(action);
        number = before as usize;
    }
    let (mut text, mut state) = (String::new(), first);
    for action in actions.into_iter().rev() {
        let mut next = State::default();
        let is_ok = world.apply(&state, action, &mut next).is_ok();
        _ = writeln!(text, "  {}", describe(world, &state, is_ok.then_some(&next), action));
        state = next;
    }
    text
}

fn describe(world: &World, before: &State, after: Option<&State>, action: Action) -> String {
    let mad = |packet: u32| {
        let packet = world.packet(packet);
        let text = message(packet).map_or_else(|| "Data".to_owned(), |message| format!("{message:?}"));
        let kind = text.split('(').next().unwrap_or_default().to_uppercase();
        format!("{kind} from {}", packet.from)
    };
    let next = |host: u8| mad(before.links[usize::from(host)][0].0);
    let (host, mut text) = match action {
        Action::Lose(host) => return format!("lost: {}", next(host)),
        Action::Duplicate(host) => return format!("duplicated: {}", next(host)),
        Action::Delay(host) => return format!("delayed: {}", next(host)),
        Action::Arrive(host, packet) => (host, format!("host {host} receives {}", mad(packet))),
        Action::ArriveLate(host, at) => (host, format!("host {host} receives {}", mad(before.late[at as usize].0))),
        Action::Happen(host, input) => (host, format!("host {host}: {input:?}")),
    };
    let Some(after) = after else { return text };
    let host = &world.info(after, host.into()).host;
    for session in &host.sessions {
        let phase = host.manager.phase(session.id);
        _ = write!(text, "; {:x} {:?} {phase:?} qp {:?}", session.id, session.stage, session.qpn);
    }
    let to = 1 - usize::from(host.number);
    let kept = before.links[to].len();
    for (packet, _) in after.links[to].iter().skip(kept) {
        _ = write!(text, "; sends {}", mad(*packet));
    }
    text
}
