//! A case is one inline function. It runs on both sides in every situation, and both must behave the same.

use crate::c;
use crate::recorder::{self, Call};
use crate::world::{PROVIDERS, Provider, World};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    C,
    Rust,
}

/// A name for error messages, and a function that changes the initial state.
pub type Variant = (&'static str, fn(&World));

/// An inline function and its call.
pub struct Case {
    /// Name in C.
    pub name: &'static str,
    call: fn(Side, &World) -> u64,
    /// The operation of `verbs_context` that it uses.
    operation: Option<(&'static str, usize)>,
    providers: &'static [Provider],
    /// Changes of the initial state, one per run.
    variants: Vec<Variant>,
    /// Whether it calls only the operation, and calls it whenever it exists.
    plain: bool,
    /// Whether only the sign of the results must be equal.
    only_sign: bool,
}

/// Return values of recorded functions: success, errnos that start a fallback and errnos that do not, and values that
/// are neither. For a function that returns a pointer, 0 is null.
const ANSWERS: [i64; 6] = [0, 1, libc::EINVAL as i64, libc::EOPNOTSUPP as i64, libc::ENOSYS as i64, -2];

#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    returned: u64,
    errno: i32,
    calls: Vec<Call>,
    bytes: Vec<u8>,
}

impl Case {
    pub fn new(name: &'static str, call: fn(Side, &World) -> u64) -> Self {
        Self {
            name,
            call,
            operation: None,
            providers: &[Provider::Has],
            variants: vec![("", |_| {})],
            plain: false,
            only_sign: false,
        }
    }

    /// The function uses an operation of `verbs_context`, and may have a fallback.
    pub fn with(mut self, operation: &'static str, offset: usize) -> Self {
        self.operation = Some((operation, offset));
        self.providers = &PROVIDERS;
        self
    }

    /// The function calls only that operation, or fails.
    pub fn plainly(mut self) -> Self {
        self.plain = true;
        self
    }

    /// Runs only with these providers: with others the C side would crash.
    pub fn only(mut self, providers: &'static [Provider]) -> Self {
        self.providers = providers;
        self
    }

    pub fn only_sign(mut self) -> Self {
        self.only_sign = true;
        self
    }

    pub fn variants(mut self, variants: &[Variant]) -> Self {
        self.variants = variants.to_vec();
        self
    }

    fn run(&self, side: Side, world: &World, provider: Provider, answer: i64, prepare: fn(&World)) -> Outcome {
        const UNTOUCHED: i32 = 1234;
        world.reset(provider, self.operation.map_or(0, |(_, offset)| offset));
        recorder::start(world, answer);
        prepare(world);
        recorder::set_errno(UNTOUCHED);
        let returned = (self.call)(side, world);
        let errno = recorder::errno();
        let returned = if self.only_sign { (returned as i64).signum() as u64 } else { returned };
        Outcome { returned, errno, calls: recorder::log(), bytes: world.bytes() }
    }

    /// Compares both sides. Returns the number of situations.
    pub fn compare(&self) -> usize {
        let world = World::new();
        let mut situations = 0;
        for &provider in self.providers {
            for answer in ANSWERS {
                for &(variant, prepare) in &self.variants {
                    let what = format!("{} {variant} with {provider:?}, answer {answer}", self.name);
                    let c = self.run(Side::C, &world, provider, answer, prepare);
                    let rust = self.run(Side::Rust, &world, provider, answer, prepare);
                    self.check_calls(&what, provider, &c);
                    assert_eq!(rust.calls, c.calls, "calls of {what}");
                    assert_eq!(rust.returned, c.returned, "result of {what}");
                    assert_eq!(rust.errno, c.errno, "errno after {what}");
                    let differs = rust.bytes.iter().zip(&c.bytes).position(|(rust, c)| rust != c);
                    assert_eq!(differs, None, "memory after {what}");
                    situations += 1;
                }
            }
        }
        situations
    }

    /// Checks with the C side that the situation is as intended.
    fn check_calls(&self, what: &str, provider: Provider, c: &Outcome) {
        let Some((operation, _)) = self.operation.filter(|_| self.plain) else { return };
        let called = c.calls.iter().map(|(name, _)| *name).collect::<Vec<_>>();
        let expected = match provider {
            Provider::Has | Provider::Covers => vec![operation],
            _ => Vec::new(),
        };
        assert_eq!(called, expected, "calls of {what} in C");
    }
}

/// Compares all cases. Returns the number of situations, or `None` if there is no C side.
pub fn compare(cases: &[Case]) -> Option<usize> {
    c::inlines()?;
    Some(cases.iter().map(Case::compare).sum())
}

/// `case!(NAME(w; argument, ...))` creates a case that calls NAME with these arguments, in C and in Rust.
macro_rules! case {
    ($name:ident($world:ident $(; $($argument:expr),*)?)) => {
        $crate::case::Case::new(stringify!($name), |side, $world| {
            use $crate::recorder::Word as _;
            match side {
                $crate::case::Side::C => {
                    let shim = $crate::case::pointer!($name($($($argument),*)?));
                    unsafe { $crate::c::twin(shim, stringify!($name))($($($argument),*)?) }.word()
                }
                #[allow(unused_unsafe)]
                $crate::case::Side::Rust => unsafe { rdma_sys::$name($($($argument),*)?) }.word(),
            }
        })
    };
    // Calls an operation of verbs_context, or fails.
    ($name:ident($($rest:tt)*) of $operation:ident) => {
        $crate::case::case!($name($($rest)*))
            .with(stringify!($operation), std::mem::offset_of!(rdma_sys::verbs_context, $operation))
            .plainly()
    };
}
pub(crate) use case;

/// The shim as a function pointer with one parameter per argument. (A cast would be resolved too late to infer the
/// types.)
macro_rules! pointer {
    ($name:ident($($argument:expr),*)) => {
        $crate::case::pointer!(@ $name [] $($argument),*)
    };
    (@ $name:ident [$($parameter:tt)*] $argument:expr $(, $rest:expr)*) => {
        $crate::case::pointer!(@ $name [$($parameter)* _,] $($rest),*)
    };
    (@ $name:ident [$($parameters:tt)*]) => {{
        let shim: unsafe fn($($parameters)*) -> _ = rdma_sys::$name;
        shim
    }};
}
pub(crate) use pointer;
