#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| mooncake_fuzz::group_control(data));
