//! Dispatch of one call: decodes the request, runs the handler, encodes the response.

use mooncake_core::error::Result;

use super::frame::Status;
use super::message::{Request, TABLE_VERSION};
use super::pack::{self, Answer, Items, Pack, Unpack, Wire, Writer};
use super::server::Refusal;

/// Outcomes of the items of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Number of items; 1 for a call about one object.
    pub items: u64,
    /// Number of items that failed.
    pub failed: u64,
}

impl Tally {
    fn add<T, E>(&mut self, outcome: &Result<T, E>) {
        self.items += 1;
        self.failed += u64::from(outcome.is_err());
    }
}

/// A response that has one outcome per item.
pub(super) trait Outcomes {
    fn tell(&self, tally: &mut Tally);
}

impl<T, E> Outcomes for Result<T, E> {
    fn tell(&self, tally: &mut Tally) {
        tally.add(self);
    }
}

impl<T, E> Outcomes for Vec<Result<T, E>> {
    fn tell(&self, tally: &mut Tally) {
        self.iter().for_each(|outcome| tally.add(outcome));
    }
}

pub(super) type Outcome = Result<(), Refusal>;

/// A call in progress.
pub(super) struct Call<'c> {
    body: &'c [u8],
    out: &'c mut Vec<u8>,
    tally: Tally,
}

impl<'c> Call<'c> {
    pub(super) fn new(body: &'c [u8], out: &'c mut Vec<u8>) -> Self {
        Self { body, out, tally: Tally::default() }
    }

    /// Returns the outcomes of the items so far.
    pub(super) fn tally(&self) -> Tally {
        self.tally
    }

    /// Decodes the arguments, runs `ask` and encodes the response. The response has the type in the
    /// table, except for the type of its error.
    pub(super) fn answer<R, T>(&mut self, ask: impl FnOnce(R) -> T) -> Outcome
    where
        R: Request + Unpack<'c>,
        T: Pack + Outcomes,
    {
        const { assert!(<R::Reply as Wire>::LITERAL.hash() == T::LITERAL.hash()) };
        let answer = ask(self.read()?);
        answer.tell(&mut self.tally);
        pack::encode(&answer, self.out);
        Ok(())
    }

    /// Handles a call like [`Call::answer`] whose response is a count and cannot carry an error.
    pub(super) fn answer_count<R>(&mut self, ask: impl FnOnce(R) -> Result<u64>) -> Outcome
    where
        R: Request<Reply = i64> + Unpack<'c>,
    {
        let count = ask(self.read()?);
        self.tally.add(&count);
        let count = count.unwrap_or_else(|error| {
            tracing::warn!(%error, "{} failed", R::NAME);
            0
        });
        pack::encode(&signed(count), self.out);
        Ok(())
    }

    fn read<R: Request + Unpack<'c>>(&self) -> Result<R, Refusal> {
        let request =
            if R::HAS_ARGUMENTS { pack::decode(self.body) } else { pack::decode_nothing(self.body) };
        request.map_err(|error| {
            let text = format!("{}: {error}; this build supports version {TABLE_VERSION}", R::NAME);
            (Status::InvalidArguments, text)
        })
    }

    /// Handles a call like [`Call::answer`] about one item, whose value `ask` appends.
    pub(super) fn answer_one<R, T>(&mut self, ask: impl Fn(&R, &mut Writer<'_>) -> Result<()>) -> Outcome
    where
        R: Request<Reply = Answer<T>> + Unpack<'c>,
        T: Wire,
    {
        let (request, tally) = (self.read()?, &mut self.tally);
        let ask = |_, out: &mut Writer<'_>| {
            let outcome = ask(&request, out);
            tally.add(&outcome);
            outcome
        };
        whole::<R>(pack::encode_answers::<T>(Items::One, self.out, ask))
    }

    /// Handles a call like [`Call::answer`] about a list of items, whose values `ask` appends.
    pub(super) fn answer_each<R, T>(
        &mut self,
        count: impl Fn(&R) -> usize,
        ask: impl Fn(&R, usize, &mut Writer<'_>) -> Result<()>,
    ) -> Outcome
    where
        R: Request<Reply = Vec<Answer<T>>> + Unpack<'c>,
        T: Wire,
    {
        let (request, tally) = (self.read()?, &mut self.tally);
        let items = Items::Many(count(&request));
        let ask = |index, out: &mut Writer<'_>| {
            let outcome = ask(&request, index, out);
            tally.add(&outcome);
            outcome
        };
        whole::<R>(pack::encode_answers::<T>(items, self.out, ask))
    }
}

fn whole<R: Request>(fits: bool) -> Outcome {
    match fits {
        true => Ok(()),
        false => Err((Status::BadResult, format!("{}: a name in the response is too long", R::NAME))),
    }
}

pub(super) fn each<T, U>(items: &[T], ask: impl FnMut(&T) -> U) -> Vec<U> {
    items.iter().map(ask).collect()
}

pub(super) fn signed(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
