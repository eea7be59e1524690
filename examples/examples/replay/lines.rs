//! Lines of a trace file, which may be compressed.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;

/// Maximum length of a line, so that a file without line ends does not fill the memory.
pub(crate) const MAX_LINE_BYTES: usize = 16 << 20;

/// First bytes of a file of gzip (RFC 1952) and of Zstandard (RFC 8878).
const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// Lines of a file, each with its number from 1 on. Not to be read on after an error.
pub(crate) struct Lines {
    input: Box<dyn BufRead>,
    number: usize,
}

impl Lines {
    /// Opens a file. Its first bytes show the compression, whatever the name is.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let mut file = File::open(path)?;
        let mut head = Vec::new();
        file.by_ref().take(ZSTD.len() as u64).read_to_end(&mut head)?;
        let (is_gzip, is_zstd) = (head.starts_with(GZIP), head.starts_with(ZSTD));
        let whole = BufReader::new(Cursor::new(head).chain(file));
        let input: Box<dyn BufRead> = if is_gzip {
            Box::new(BufReader::new(MultiGzDecoder::new(whole)))
        } else if is_zstd {
            Box::new(BufReader::new(zstd::stream::read::Decoder::with_buffer(whole)?))
        } else {
            Box::new(whole)
        };
        Ok(Self { input, number: 0 })
    }

    fn read_line(&mut self) -> Result<Option<String>, String> {
        let mut line = Vec::new();
        let limit = MAX_LINE_BYTES as u64 + 1;
        let read = self.input.by_ref().take(limit).read_until(b'\n', &mut line);
        read.map_err(|e| e.to_string())?;
        if line.last() == Some(&b'\n') {
            line.pop();
        } else if line.is_empty() {
            return Ok(None);
        }
        if line.len() > MAX_LINE_BYTES {
            return Err(format!("a line is longer than {MAX_LINE_BYTES} bytes"));
        }
        String::from_utf8(line).map(Some).map_err(|_| "a line is not valid UTF-8".into())
    }
}

impl Iterator for Lines {
    type Item = (usize, Result<String, String>);

    fn next(&mut self) -> Option<Self::Item> {
        self.number += 1;
        self.read_line().transpose().map(|line| (self.number, line))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    type Encode = fn(&[u8]) -> Vec<u8>;

    fn lines(bytes: &[u8]) -> Vec<Result<String, String>> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        let mut read = Vec::new();
        for (number, line) in Lines::open(file.path()).unwrap() {
            read.push(line);
            assert_eq!(number, read.len());
            if read.last().unwrap().is_err() {
                break;
            }
        }
        read
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn compressed_files_are_read() {
        let expected: Vec<Result<String, String>> =
            vec![Ok("one".into()), Ok(String::new()), Ok("two".into())];
        let zstd = |bytes: &[u8]| zstd::encode_all(bytes, 3).unwrap();
        let forms: [Encode; 3] = [|bytes| bytes.to_vec(), gzip, zstd];
        for form in forms {
            assert_eq!(lines(&form(b"one\n\ntwo")), expected);
            assert_eq!(lines(&[form(b"one\n\n"), form(b"two\n")].concat()), expected, "two parts");
            assert!(lines(&form(b"")).is_empty());
        }
        assert_eq!(lines(b"\x1f"), [Ok("\x1f".to_owned())]);
    }

    #[test]
    fn truncated_and_damaged_files_are_errors() {
        let text: Vec<u8> =
            (0..5000u32).flat_map(|n| format!("{}\n", n.wrapping_mul(0x9e37_79b9)).into_bytes()).collect();
        for whole in [gzip(&text), zstd::encode_all(&text[..], 3).unwrap()] {
            for len in [5, 11, 40, whole.len() / 2, whole.len() - 1] {
                let read = lines(&whole[..len]);
                assert!(read.last().unwrap().is_err(), "{len} of {}", whole.len());
            }
            for at in (4..whole.len()).step_by(397) {
                let mut damaged = whole.clone();
                damaged[at] ^= 0x55;
                // Any result but a panic: not every byte is covered by a checksum.
                let _ = lines(&damaged);
            }
        }
    }

    #[test]
    fn a_line_is_bounded() {
        let mut bytes = vec![b'x'; MAX_LINE_BYTES];
        assert_eq!(lines(&bytes)[0].as_ref().unwrap().len(), MAX_LINE_BYTES);
        bytes.push(b'\n');
        assert_eq!(lines(&bytes)[0].as_ref().unwrap().len(), MAX_LINE_BYTES);
        bytes[MAX_LINE_BYTES] = b'x';
        assert_eq!(lines(&bytes), [Err("a line is longer than 16777216 bytes".to_owned())]);
        assert_eq!(lines(&gzip(&bytes)).len(), 1);
        assert_eq!(lines(b"a\n\xff\n"), [Ok("a".to_owned()), Err("a line is not valid UTF-8".to_owned())]);
    }
}
