//! A token: what stands for a waiting contender in a row.

use std::fmt;

use mysql::Value;

/// How many contenders of a process can wait under different tokens.
const CONTENDERS: u64 = 1_000_000;

/// 18 digits in `waiters` and `owner_id`: 12 for the process (a factory), 6 for the contender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Token(pub(super) u64);

impl Token {
    /// No contender has it.
    pub(super) const NONE: Token = Token(0);

    /// The token of the contender with this number, which wraps.
    pub(super) fn new(process: u64, number: u64) -> Token {
        Token(process * CONTENDERS + number % CONTENDERS)
    }

    pub(super) fn process(self) -> u64 {
        self.0 / CONTENDERS
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// As text, because it is compared with text.
impl From<Token> for Value {
    fn from(token: Token) -> Value {
        token.to_string().into()
    }
}
