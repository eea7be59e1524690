//! Element types of tensors, with their codes and lengths.

use mooncake_core::{Error, Result};

macro_rules! element_types {
    ($($variant:ident = $code:literal, $bytes:literal, $name:literal;)*) => {
        /// Element type of a tensor. The codes below 18 are those of the C interface of
        /// Mooncake C++.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u8)]
        pub enum DType {
            $(#[doc = concat!("Element type `", $name, "`, code ", stringify!($code), ".")] $variant = $code,)*
        }

        impl DType {
            /// Every element type, in the order of the codes.
            pub const ALL: &'static [DType] = &[$(DType::$variant,)*];

            /// Returns the element type with this code.
            ///
            /// # Errors
            /// `INVALID_PARAMS` for a code that no type has.
            pub fn from_code(code: u8) -> Result<Self> {
                match code {
                    $($code => Ok(DType::$variant),)*
                    _ => Err(Error::invalid(format!("cannot read element type: unknown code. code={code}"))),
                }
            }

            /// Returns the length of an element in bytes.
            pub const fn bytes(self) -> usize {
                match self {
                    $(DType::$variant => $bytes,)*
                }
            }

            /// Returns the name, as in `torch`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(DType::$variant => $name,)*
                }
            }
        }
    };
}

element_types! {
    I8 = 0, 1, "int8";
    U8 = 1, 1, "uint8";
    I16 = 2, 2, "int16";
    U16 = 3, 2, "uint16";
    I32 = 4, 4, "int32";
    U32 = 5, 4, "uint32";
    I64 = 6, 8, "int64";
    U64 = 7, 8, "uint64";
    F16 = 8, 2, "float16";
    F32 = 9, 4, "float32";
    F64 = 10, 8, "float64";
    Bf16 = 11, 2, "bfloat16";
    Bool = 12, 1, "bool";
    F8E4M3Fn = 13, 1, "float8_e4m3fn";
    F8E5M2 = 14, 1, "float8_e5m2";
    F8E4M3Fnuz = 15, 1, "float8_e4m3fnuz";
    F8E5M2Fnuz = 16, 1, "float8_e5m2fnuz";
    F8E8M0Fnu = 17, 1, "float8_e8m0fnu";
    Complex64 = 18, 8, "complex64";
    Complex128 = 19, 16, "complex128";
}

impl DType {
    /// Returns the code.
    pub const fn code(self) -> u8 {
        self as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_dense_and_come_back() {
        for (code, dtype) in DType::ALL.iter().enumerate() {
            assert_eq!(usize::from(dtype.code()), code);
            assert_eq!(DType::from_code(dtype.code()).unwrap(), *dtype);
            assert!(dtype.bytes().is_power_of_two());
        }
        assert!(DType::from_code(20).is_err());
    }
}
