//! Errors with their text, in responses between processes of one host.

use mooncake_core::error::{Error, ErrorCode, Result};

use super::call::{Reply, Tally};
use super::pack::{self, Pack, PackError, Reader, Unpack, Wire, Writer, wire_fields};
use super::type_signature::{TypeSignature, symbol};

/// Result of a call or of one of its items: a value, or an error with its text. The responses of a
/// master have the code alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reported<T>(Result<T, ErrorReport>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct ErrorReport {
    code: ErrorCode,
    text: String,
}

wire_fields!(structure ErrorReport { code: ErrorCode, text: String });

impl<T> Reported<T> {
    /// Converts the result inside a process. The text of an error includes its context.
    pub fn of(outcome: Result<T>) -> Self {
        Self(outcome.map_err(|error| {
            let code = error.code();
            let (text, number) = (error.to_string(), format!(" ({} {})", code.name(), code.number()));
            ErrorReport { code, text: text.strip_suffix(&number).unwrap_or(&text).to_owned() }
        }))
    }

    /// Returns the result inside a process.
    ///
    /// # Errors
    /// Returns the reported error.
    pub fn outcome(self) -> Result<T> {
        self.0.map_err(|ErrorReport { code, text }| Error::new(code, text))
    }
}

impl<T: Wire> Wire for Reported<T> {
    const SIGNATURE: TypeSignature =
        TypeSignature::new(&[symbol::EXPECTED]).then(T::SIGNATURE).then(ErrorReport::SIGNATURE);
    const MIN_LEN: usize =
        1 + if T::MIN_LEN < ErrorReport::MIN_LEN { T::MIN_LEN } else { ErrorReport::MIN_LEN };
}

impl<T: Pack> Pack for Reported<T> {
    fn widest(&self) -> usize {
        self.0.as_ref().map_or_else(Pack::widest, Pack::widest)
    }

    fn pack(&self, out: &mut Writer<'_>) {
        self.0.is_ok().pack(out);
        match &self.0 {
            Ok(value) => value.pack(out),
            Err(report) => report.pack(out),
        }
    }
}

impl<'a, T: Unpack<'a>> Unpack<'a> for Reported<T> {
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        Ok(Self(match bool::unpack(body)? {
            true => Ok(T::unpack(body)?),
            false => Err(ErrorReport::unpack(body)?),
        }))
    }
}

impl<T: Pack + for<'a> Unpack<'a>> Reply for Reported<T> {
    type Outcome = Result<T>;

    fn encode(outcome: Result<T>, _: &str, _: bool, out: &mut Vec<u8>) -> Tally {
        pack::encode(&Self::of(outcome), out);
        Tally::default()
    }

    fn into_outcome(self) -> Result<T> {
        self.outcome()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_keep_number_and_text() {
        let error = Error::new(ErrorCode::LeaseExpired, "too late").context("\"k\"");
        let mut bytes = Vec::new();
        pack::encode(&vec![Reported::of(Err(error)), Reported::of(Ok(7u64))], &mut bytes);
        let [late, seven]: [Reported<u64>; 2] = pack::decode::<Vec<_>>(&bytes).unwrap().try_into().unwrap();
        let late = late.outcome().unwrap_err();
        assert_eq!((late.code(), late.message()), (ErrorCode::LeaseExpired, "\"k\": too late"));
        assert_eq!(late.to_string(), "\"k\": too late (LEASE_EXPIRED -707)");
        assert_eq!(seven.outcome().unwrap(), 7);
    }
}
