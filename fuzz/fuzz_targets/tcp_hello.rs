#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| mooncake_fuzz::tcp_hello(data));
