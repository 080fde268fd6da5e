//! Newtypes over C enumerations.
//!
//! The kernel keeps adding values, so these are not Rust enums. A value that this crate does not know is kept, prints
//! as a number, and never panics.

/// Defines a transparent newtype with named values. `Display` and `Debug` print the names.
macro_rules! named {
    (
        $(#[$meta:meta])*
        pub struct $name:ident($repr:ty) as $what:literal {
            $($(#[$value_meta:meta])* $value:ident = $raw:expr => $text:literal,)+
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(transparent)]
        pub struct $name(pub $repr);

        impl $name {
            $($(#[$value_meta])* pub const $value: Self = Self($raw);)+

            /// All values that this crate has names for.
            pub const KNOWN: &'static [Self] = &[$(Self::$value),+];
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match *self {
                    $(Self::$value => f.pad($text),)+
                    Self(other) => write!(f, concat!($what, " {}"), other),
                }
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!(stringify!($name), "({}: {})"), self.0, self)
            }
        }
    };
}

pub(crate) use named;

#[cfg(test)]
mod tests {
    #[test]
    fn an_unknown_value_prints_as_a_number() {
        assert_eq!(crate::WcStatus(250).to_string(), "completion status 250");
        assert_eq!(crate::WcOpcode(0xff).to_string(), "opcode 255");
        assert_eq!(crate::PortState(77).to_string(), "port state 77");
    }
}
