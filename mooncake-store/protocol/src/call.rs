//! Calls as types: the arguments, the response, the treatment by a master, and the handler.

use mooncake_core::error::{Error, Result};

use super::frame::{Refusal, Status};
use super::heartbeat::Class;
use super::pack::{self, Answer, Items, Pack, Unpack, Wire, Writer};
use super::wire::WeightError;

/// Version of Mooncake C++ that the table of calls is taken from.
pub const TABLE_VERSION: &str = "0.3.13.post1";

/// A call, represented by its arguments.
pub trait Request: Pack {
    /// Name of the call.
    const NAME: &'static str;
    /// Number of the call in frames.
    const FUNCTION: u32;
    /// True if the call has arguments; a call without arguments has an empty body.
    const HAS_ARGUMENTS: bool;
    /// True if Mooncake C++ lacks the call, so that every caller must work without it.
    const IS_EXTENSION: bool;
    /// Treatment of the call by a master.
    const TREATMENT: Treatment;
    /// Response of the call.
    type Reply: Reply;
}

/// Treatment of a call by a master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Treatment {
    /// Treatment under overload.
    pub class: Class,
    /// Name of the counters of requests and failures in the metrics. Calls may share counters.
    pub counter: Option<&'static str>,
    /// Name of the counters of requests and items in the metrics. A call that has both names counts
    /// as a batch unless it is about one item.
    pub batch_counter: Option<&'static str>,
    /// True if the call visits every object, or may have to. With millions of objects this takes
    /// long.
    pub visits_all: bool,
    /// True if the call serves to outlive the master. An embedded master refuses it.
    pub remote_only: bool,
}

impl Treatment {
    /// Treatment of a call whose row in the table names none.
    pub const DEFAULT: Self = Self {
        class: Class::Critical,
        counter: None,
        batch_counter: None,
        visits_all: false,
        remote_only: false,
    };
}

/// Response of a call in the form of a body, where an error is a number.
pub trait Reply: Pack + for<'a> Unpack<'a> {
    /// The response inside a process, where an error has a context.
    type Outcome;

    /// Appends a response to the call of this name as a body, with its compatible fields if the
    /// caller knows them. Returns the outcomes of its items.
    fn encode(outcome: Self::Outcome, call: &str, with_members: bool, out: &mut Vec<u8>) -> Tally;

    /// Converts a decoded response.
    fn into_outcome(self) -> Self::Outcome;
}

/// Response of the call `R` inside a process.
pub type Outcome<R> = <<R as Request>::Reply as Reply>::Outcome;

impl<T: Pack + for<'a> Unpack<'a>> Reply for Answer<T> {
    type Outcome = Result<T>;

    fn encode(outcome: Result<T>, _: &str, with_members: bool, out: &mut Vec<u8>) -> Tally {
        pack::encode_reply(&outcome, with_members, out);
        Tally::of([&outcome])
    }

    fn into_outcome(self) -> Result<T> {
        self.map_err(Error::from)
    }
}

impl<T: Pack + for<'a> Unpack<'a>> Reply for Vec<Answer<T>> {
    type Outcome = Vec<Result<T>>;

    fn encode(outcome: Vec<Result<T>>, _: &str, with_members: bool, out: &mut Vec<u8>) -> Tally {
        pack::encode_reply(&outcome, with_members, out);
        Tally::of(&outcome)
    }

    fn into_outcome(self) -> Vec<Result<T>> {
        self.into_iter().map(|answer| answer.map_err(Error::from)).collect()
    }
}

/// Encoding of a response about managed weights, whose errors have numbers of their own.
impl<T: Pack + for<'a> Unpack<'a>> Reply for Result<T, WeightError> {
    type Outcome = Self;

    fn encode(outcome: Self, _: &str, with_members: bool, out: &mut Vec<u8>) -> Tally {
        pack::encode_reply(&outcome, with_members, out);
        Tally::of([&outcome])
    }

    fn into_outcome(self) -> Self {
        self
    }
}

/// Encoding of a count as a body without a field for an error: a failed call has the count 0.
impl Reply for i64 {
    type Outcome = Result<i64>;

    fn encode(outcome: Result<i64>, call: &str, _: bool, out: &mut Vec<u8>) -> Tally {
        let tally = Tally::of([&outcome]);
        let count = outcome.unwrap_or_else(|error| {
            tracing::warn!(%error, "{call} failed");
            0
        });
        pack::encode(&count, out);
        tally
    }

    fn into_outcome(self) -> Result<i64> {
        Ok(self)
    }
}

/// Encoding of a yes or no as a body without a field for an error.
impl Reply for bool {
    type Outcome = bool;

    fn encode(outcome: bool, _: &str, _: bool, out: &mut Vec<u8>) -> Tally {
        pack::encode(&outcome, out);
        Tally::default()
    }

    fn into_outcome(self) -> bool {
        self
    }
}

/// Outcomes of the items of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Number of items; 1 for a call about one object.
    pub items: u64,
    /// Number of items that failed.
    pub failed: u64,
}

impl Tally {
    fn of<'r, T: 'r, E: 'r>(outcomes: impl IntoIterator<Item = &'r Result<T, E>>) -> Self {
        let mut tally = Self::default();
        outcomes.into_iter().for_each(|outcome| tally.add(outcome));
        tally
    }

    fn add<T, E>(&mut self, outcome: &Result<T, E>) {
        self.items += 1;
        self.failed += u64::from(outcome.is_err());
    }
}

/// Handler of the call `R`.
pub trait Handle<R: Request> {
    /// Handles the call.
    fn handle(&self, request: R) -> Outcome<R>;

    /// Handles the call and encodes its response. A handler of a frequent call overrides this
    /// method to encode the response without an intermediate copy.
    ///
    /// # Errors
    /// Returns the reason if there is no valid response. Errors of the call itself are part of the
    /// response.
    fn respond(&self, request: R, response: &mut Response<'_>) -> Result<(), Refusal> {
        response.set::<R>(self.handle(request));
        Ok(())
    }
}

/// Response of a call that is being handled.
#[derive(Debug)]
pub struct Response<'o> {
    out: &'o mut Vec<u8>,
    tally: Tally,
    receipt: Option<u64>,
    with_members: bool,
}

impl<'o> Response<'o> {
    /// Creates a response whose body is appended to `out`. It has no compatible fields.
    pub fn new(out: &'o mut Vec<u8>) -> Self {
        Self { out, tally: Tally::default(), receipt: None, with_members: false }
    }

    /// Permits compatible fields in the response to a request from Mooncake C++, which knows or
    /// ignores them. Earlier versions of this system refuse them.
    #[must_use]
    pub fn to_request(self, body: &[u8]) -> Self {
        Self { with_members: pack::is_spelled(body), ..self }
    }

    /// Returns whether the response may have compatible fields.
    pub fn may_have_members(&self) -> bool {
        self.with_members
    }

    /// Sets the logical time at which the server had read the request.
    #[must_use]
    pub fn received_at(self, receipt: Option<u64>) -> Self {
        Self { receipt, ..self }
    }

    /// Returns the logical time at which the server had read the request, if it is known.
    pub fn receipt(&self) -> Option<u64> {
        self.receipt
    }

    /// Returns the outcomes of the items so far.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// Encodes the response of the call `R`.
    pub fn set<R: Request>(&mut self, outcome: Outcome<R>) {
        self.tally = R::Reply::encode(outcome, R::NAME, self.with_members, self.out);
    }

    /// Encodes the response of the call `R` about one item, whose value `write` appends.
    ///
    /// # Errors
    /// Returns `BadResult` if a name in the value has 256 bytes or more.
    pub fn write_one<R, T>(
        &mut self,
        mut write: impl FnMut(&mut Writer<'_>) -> Result<()>,
    ) -> Result<(), Refusal>
    where
        R: Request<Reply = Answer<T>>,
        T: Wire,
    {
        self.write::<R, T>(Items::One { longest: 0 }, |_, out| write(out))
    }

    /// Encodes the response of the call `R` about one request. `write` appends the value, in which
    /// lengths are at most `longest`.
    ///
    /// # Errors
    /// Returns `BadResult` if a length in the value exceeds `longest` by much.
    pub fn write_value<R, T>(
        &mut self,
        longest: usize,
        mut write: impl FnMut(&mut Writer<'_>),
    ) -> Result<(), Refusal>
    where
        R: Request<Reply = Answer<T>>,
        T: Wire,
    {
        self.write::<R, T>(Items::One { longest }, |_, out| {
            write(out);
            Ok(())
        })
    }

    /// Encodes the response of the call `R` about the first of `requested` items. `write` appends
    /// the value, whose lists have at most `requested` items, and returns the number of items that
    /// it is about. The other items count as failed.
    ///
    /// # Errors
    /// Returns `BadResult` if a name in the value has 256 bytes or more and `requested` is small.
    pub fn write_front<R, T>(
        &mut self,
        requested: usize,
        mut write: impl FnMut(&mut Writer<'_>) -> usize,
    ) -> Result<(), Refusal>
    where
        R: Request<Reply = Answer<T>>,
        T: Wire,
    {
        let mut found = 0;
        let written = self.write::<R, T>(Items::One { longest: requested }, |_, out| {
            found = write(out);
            Ok(())
        });
        let failed = requested.saturating_sub(found);
        self.tally = Tally { items: requested as u64, failed: failed as u64 };
        written
    }

    /// Encodes the response of the call `R` about `count` items, whose values `write` appends.
    ///
    /// # Errors
    /// Returns `BadResult` if a name in a value has 256 bytes or more and the list is short.
    pub fn write_each<R, T>(
        &mut self,
        count: usize,
        write: impl FnMut(usize, &mut Writer<'_>) -> Result<()>,
    ) -> Result<(), Refusal>
    where
        R: Request<Reply = Vec<Answer<T>>>,
        T: Wire,
    {
        self.write::<R, T>(Items::Many(count), write)
    }

    fn write<R: Request, T: Wire>(
        &mut self,
        items: Items,
        mut write: impl FnMut(usize, &mut Writer<'_>) -> Result<()>,
    ) -> Result<(), Refusal> {
        let tally = &mut self.tally;
        let fits = pack::encode_answers::<T>(items, self.out, |index, out| {
            let outcome = write(index, out);
            tally.add(&outcome);
            outcome
        });
        match fits {
            true => Ok(()),
            false => Err((Status::BadResult, format!("{}: a name in the response is too long", R::NAME))),
        }
    }
}

/// Handler of the call `R` that may wait, for a transfer for example.
pub trait HandleAsync<R: Request> {
    /// Handles the call.
    fn handle(&self, request: R) -> impl Future<Output = Outcome<R>> + Send;
}

/// Decodes the arguments of the call `R`, handles the call and encodes its response.
pub(super) fn run<'c, R, M>(master: &M, body: &'c [u8], response: &mut Response<'_>) -> Result<(), Refusal>
where
    R: Request + Unpack<'c>,
    M: Handle<R> + ?Sized,
{
    master.respond(arguments::<R>(body)?, response)
}

/// Does the same as [`run`] with a handler that may wait.
pub(super) async fn run_async<'c, R, M>(
    handler: &M,
    body: &'c [u8],
    response: &mut Response<'_>,
) -> Result<(), Refusal>
where
    R: Request + Unpack<'c>,
    M: HandleAsync<R> + ?Sized,
{
    let outcome = handler.handle(arguments::<R>(body)?).await;
    response.set::<R>(outcome);
    Ok(())
}

fn arguments<'c, R: Request + Unpack<'c>>(body: &'c [u8]) -> Result<R, Refusal> {
    let request = if R::HAS_ARGUMENTS { pack::decode(body) } else { pack::decode_nothing(body) };
    request.map_err(|error| {
        let text = format!("{}: {error}; this build supports version {TABLE_VERSION}", R::NAME);
        (Status::InvalidArguments, text)
    })
}
