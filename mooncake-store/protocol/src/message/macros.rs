//! Macros behind the tables of calls.

/// Name of a call in Mooncake C++.
macro_rules! spelled {
    ($name:ident) => {
        stringify!($name)
    };
    ($name:ident $spelled:literal) => {
        $spelled
    };
}

/// Treatment of a call, from the brackets of its row.
macro_rules! treatment {
    ($so_far:expr;) => {
        $so_far
    };
    ($so_far:expr; in $class:ident $(, $($rest:tt)*)?) => {
        treatment!(Treatment { class: Class::$class, ..$so_far }; $($($rest)*)?)
    };
    ($so_far:expr; counter $name:ident $(, $($rest:tt)*)?) => {
        treatment!(Treatment { counter: Some(stringify!($name)), ..$so_far }; $($($rest)*)?)
    };
    ($so_far:expr; batch_counter $name:ident $(, $($rest:tt)*)?) => {
        treatment!(Treatment { batch_counter: Some(stringify!($name)), ..$so_far }; $($($rest)*)?)
    };
    ($so_far:expr; visits_all $(, $($rest:tt)*)?) => {
        treatment!(Treatment { visits_all: true, ..$so_far }; $($($rest)*)?)
    };
    ($so_far:expr; remote_only $(, $($rest:tt)*)?) => {
        treatment!(Treatment { remote_only: true, ..$so_far }; $($($rest)*)?)
    };
}

/// Declares calls and their table. With `handled by`, also declares the trait of their handlers.
/// With `awaited by`, the handlers may wait.
macro_rules! calls {
    (
        $(#[$about:meta])*
        $table:ident of $class:literal, awaited by $handlers:ident;
        $($rows:tt)*
    ) => {
        calls! { $(#[$about])* $table of $class; $($rows)* }
        async_handlers! { $table, $handlers; $($rows)* }
    };
    (
        $(#[$about:meta])*
        $table:ident of $class:literal, handled by $handlers:ident;
        $($rows:tt)*
    ) => {
        calls! { $(#[$about])* $table of $class; $($rows)* }
        handlers! { $table, $handlers; $($rows)* }
    };
    (
        $(#[$about:meta])*
        $table:ident of $class:literal;
        $(
        $(#[$meta:meta])*
        $name:ident $(as $spelled:literal)? $(<$life:lifetime>)? (
            $($argument:ident: $type:ty $([since $version:literal])?),* $(,)?
        ) -> $reply:ty $([$($treatment:tt)*])?;
    )*) => {
        $(
            $(#[$meta])*
            #[derive(Clone, Debug, PartialEq, Eq)]
            pub struct $name $(<$life>)? {
                $(#[doc = meaning!($argument)] pub $argument: wire_field!(type $type $(, $version)?),)*
            }

            wire_fields!(arguments $name $(<$life>)? { $($argument: $type $([since $version])?),* });

            #[allow(unused_lifetimes)]
            impl<'a> Request for $name $(<$life>)? {
                const NAME: &'static str = stringify!($name);
                const FUNCTION: u32 = function_id(concat!($class, "::", spelled!($name $($spelled)?)));
                const HAS_ARGUMENTS: bool =
                    !<Self as super::pack::Wire>::SIGNATURE.as_bytes().is_empty();
                const IS_EXTENSION: bool = is_extension($class);
                const TREATMENT: Treatment = treatment!(Treatment::DEFAULT; $($($treatment)*)?);
                type Reply = $reply;
            }
        )*

        $(#[$about])*
        pub static $table: &[Shape] = &[$(
            Shape {
                name: stringify!($name),
                function: <$name as Request>::FUNCTION,
                arguments: <$name as super::pack::Wire>::SIGNATURE.as_bytes(),
                reply: <$reply as super::pack::Wire>::SIGNATURE.as_bytes(),
                treatment: <$name as Request>::TREATMENT,
                rewrite_arguments: |body, spelled| rewritten::<$name>(body, spelled),
                rewrite_reply: |body, spelled| rewritten::<$reply>(body, spelled),
            },
        )*];
    };
}

/// Declares the trait of the handlers of a table.
macro_rules! handlers {
    ($table:ident, $handlers:ident; $(
        $(#[$meta:meta])*
        $name:ident $(as $spelled:literal)? $(<$life:lifetime>)? ($($arguments:tt)*) -> $reply:ty
            $([$($treatment:tt)*])?;
    )*) => {
        #[doc = concat!("Handlers of all calls in [`", stringify!($table), "`].")]
        pub trait $handlers: $(for<'a> Handle<$name $(<$life>)?> +)* Send + Sync + 'static {
            /// Handles the call with this number and encodes its response. Returns `None` if the
            /// table has no such call.
            fn dispatch(
                &self,
                function: u32,
                body: &[u8],
                response: &mut Response<'_>,
            ) -> Option<Result<(), Refusal>> {
                Some(match function {
                    $(<$name as Request>::FUNCTION => run::<$name, Self>(self, body, response),)*
                    _ => return None,
                })
            }

            /// Returns the treatment of the call with this number, if the table has it.
            fn treatment(function: u32) -> Option<&'static Treatment>
            where
                Self: Sized,
            {
                Some(match function {
                    $(<$name as Request>::FUNCTION => &<$name as Request>::TREATMENT,)*
                    _ => return None,
                })
            }
        }

        impl<M> $handlers for M where M: $(for<'a> Handle<$name $(<$life>)?> +)* Send + Sync + 'static {}
    };
}

/// Declares the trait of the handlers of a table that may wait.
macro_rules! async_handlers {
    ($table:ident, $handlers:ident; $(
        $(#[$meta:meta])*
        $name:ident $(<$life:lifetime>)? ($($arguments:tt)*) -> $reply:ty;
    )*) => {
        #[doc = concat!("Handlers of all calls in [`", stringify!($table), "`].")]
        pub trait $handlers: $(for<'a> HandleAsync<$name $(<$life>)?> +)* Send + Sync {
            /// Handles the call with this number and encodes its response. Returns `None` if the
            /// table has no such call.
            fn dispatch(
                &self,
                function: u32,
                body: &[u8],
                response: &mut Response<'_>,
            ) -> impl Future<Output = Option<Result<(), Refusal>>> + Send {
                async move {
                    Some(match function {
                        $(<$name as Request>::FUNCTION => {
                            run_async::<$name, Self>(self, body, response).await
                        })*
                        _ => return None,
                    })
                }
            }
        }

        impl<M> $handlers for M where M: $(for<'a> HandleAsync<$name $(<$life>)?> +)* Send + Sync {}
    };
}
