//! ZooKeeper's encoding (jute): big-endian numbers, length-prefixed bytes, length-prefixed frames.
//!
//! Everything here is bounded: nothing is allocated on the word of a length that came over the wire,
//! and what does not decode is an error, never a panic. What the bytes mean is in `message.rs`.

use std::mem;

use crate::error::{Error, ErrorKind, Result};

/// The largest frame that is taken: the names of a million contenders. A frame in the making never
/// holds more than what has arrived.
pub(super) const MAX_FRAME: usize = 64 << 20;

/// What the bytes of a connection mean that is thrown away: no ZooKeeper server would say them.
pub(super) fn malformed(what: &str) -> Error {
    let no_server =
        "the server sent what a ZooKeeper server would not; is this a ZooKeeper server?";
    Error::new(ErrorKind::Protocol, format!("{no_server} ({what})"))
}

/// Writes frames one after another into one buffer, so that a batch is one system call.
#[derive(Default)]
pub(super) struct Encoder {
    bytes: Vec<u8>,
}

impl Encoder {
    /// Writes a frame, whose body `write` writes.
    pub(super) fn frame(&mut self, write: impl FnOnce(&mut Encoder)) {
        let begin = self.bytes.len() + 4;
        self.int(0);
        write(self);
        let length = self.bytes.len().saturating_sub(begin);
        let length = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
        if let Some(place) = self.bytes.get_mut(begin - 4..begin) {
            place.copy_from_slice(&length);
        }
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Encoder {
        self.bytes.extend_from_slice(bytes);
        self
    }

    pub(super) fn bool(&mut self, value: bool) -> &mut Encoder {
        self.bytes(&[u8::from(value)])
    }

    pub(super) fn int(&mut self, value: i32) -> &mut Encoder {
        self.bytes(&value.to_be_bytes())
    }

    pub(super) fn long(&mut self, value: i64) -> &mut Encoder {
        self.bytes(&value.to_be_bytes())
    }

    pub(super) fn buffer(&mut self, value: &[u8]) -> &mut Encoder {
        self.count(value.len()).bytes(value)
    }

    pub(super) fn text(&mut self, value: &str) -> &mut Encoder {
        self.buffer(value.as_bytes())
    }

    pub(super) fn count(&mut self, count: usize) -> &mut Encoder {
        self.int(i32::try_from(count).unwrap_or(i32::MAX))
    }

    /// Takes what was written, and begins anew.
    pub(super) fn take(&mut self) -> Vec<u8> {
        mem::take(&mut self.bytes)
    }
}

/// Reads the fields of one frame.
#[derive(Clone, Copy)]
pub(super) struct Decoder<'a> {
    rest: &'a [u8],
}

impl<'a> Decoder<'a> {
    pub(super) fn new(frame: &'a [u8]) -> Decoder<'a> {
        Decoder { rest: frame }
    }

    fn chunk<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (bytes, rest) = self
            .rest
            .split_first_chunk()
            .ok_or_else(|| malformed("cut short"))?;
        self.rest = rest;
        Ok(*bytes)
    }

    pub(super) fn bool(&mut self) -> Result<bool> {
        self.chunk().map(|[byte]| byte != 0)
    }

    pub(super) fn int(&mut self) -> Result<i32> {
        self.chunk().map(i32::from_be_bytes)
    }

    pub(super) fn long(&mut self) -> Result<i64> {
        self.chunk().map(i64::from_be_bytes)
    }

    /// A buffer; the null buffer (length -1) counts as empty.
    pub(super) fn buffer(&mut self) -> Result<&'a [u8]> {
        let length = match self.int()? {
            -1 => 0,
            length => usize::try_from(length).map_err(|_| malformed("negative length"))?,
        };
        let split = self.rest.split_at_checked(length);
        let (bytes, rest) = split.ok_or_else(|| malformed("length beyond the frame"))?;
        self.rest = rest;
        Ok(bytes)
    }

    pub(super) fn text(&mut self) -> Result<String> {
        let text = std::str::from_utf8(self.buffer()?);
        text.map(str::to_owned)
            .map_err(|_| malformed("text is not UTF-8"))
    }

    /// A list of texts. Grown as they come: the count on the wire reserves nothing.
    pub(super) fn texts(&mut self) -> Result<Vec<String>> {
        let count = self.int()?.max(0);
        (0..count).map(|_| self.text()).collect()
    }
}

/// Cuts the stream of bytes from a server into frames.
#[derive(Default)]
pub(super) struct Frames {
    bytes: Vec<u8>,
    /// How much of `bytes` has been handed out.
    used: usize,
}

impl Frames {
    /// Takes what has arrived.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.used);
        self.used = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// The next frame that has arrived in full. A frame that announces more than `limit` bytes is an error.
    pub(super) fn next(&mut self, limit: usize) -> Result<Option<Vec<u8>>> {
        let arrived = self.bytes.get(self.used..).unwrap_or_default();
        let Some((length, rest)) = arrived.split_first_chunk::<4>() else {
            return Ok(None);
        };
        let length = usize::try_from(i32::from_be_bytes(*length))
            .ok()
            .filter(|length| *length <= limit)
            .ok_or_else(|| malformed("frame length out of bounds"))?;
        let Some(frame) = rest.get(..length) else {
            return Ok(None);
        };
        let frame = frame.to_vec();
        self.used += 4 + length;
        Ok(Some(frame))
    }
}

#[cfg(test)]
pub(super) mod tests {
    //! Nothing that a server can send makes the decoder panic or allocate out of proportion.

    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::super::message::{Mode, Pass, Reply, Request, decode_event, decode_head};
    use super::*;

    /// A number from the environment.
    pub(in super::super) fn number(name: &str, default: u64) -> u64 {
        std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
    }

    /// A frame that begins like a true one and then goes wrong in one of the ways that matter: lengths
    /// that lie, an early end, flipped bytes, noise.
    fn frame(rng: &mut StdRng) -> Vec<u8> {
        let mut out = Encoder::default();
        if rng.random_bool(0.9) {
            out.int(*pick(rng, &[-1, -2, -4, -8, 0, 1, i32::MAX, i32::MIN]));
            out.long(rng.random());
            out.int(*pick(rng, &[0, 0, 0, -101, -112, i32::MIN]));
        }
        for _ in 0..rng.random_range(0..6) {
            match rng.random_range(0..7) {
                0 => out.int(rng.random()),
                1 => out.int(*pick(rng, &[-1, -2, 0, 1, 3, i32::MAX, i32::MIN, 1 << 30])),
                2 => out.long(rng.random()),
                3 => out.text("/simba/m/_c_x-latch-0000000001"),
                4 => out.int(2).text("a").text("latch-0000000007"),
                5 => {
                    let noise: Vec<u8> =
                        (0..rng.random_range(0..24)).map(|_| rng.random()).collect();
                    out.buffer(&noise)
                }
                _ => (0..8).fold(&mut out, |out, _| out.long(rng.random())),
            };
        }
        let mut bytes = out.take();
        for _ in 0..rng.random_range(0..3) {
            if bytes.is_empty() {
                break;
            }
            let at = rng.random_range(0..bytes.len());
            match rng.random_range(0..3) {
                0 => bytes.truncate(at),
                1 => bytes[at] = rng.random(),
                _ => bytes[at] ^= 1 << rng.random_range(0..8),
            }
        }
        bytes
    }

    fn pick<'a, T>(rng: &mut StdRng, from: &'a [T]) -> &'a T {
        &from[rng.random_range(0..from.len())]
    }

    /// How much a decoded reply holds.
    fn held(reply: &Reply) -> usize {
        let names = reply.line.members.iter().chain(&reply.line.others);
        let names: usize = names
            .map(|name| name.capacity() + size_of::<String>())
            .sum();
        reply.path.capacity() + reply.data.capacity() + names
    }

    /// `CONTEND_DECODER_RUNS` says how many runs there are (1 by default), `CONTEND_DECODER_INPUTS` how many
    /// inputs each has; `CONTEND_SEED` repeats them.
    #[test]
    fn any_input_is_decoded_or_refused_within_bounds() {
        let runs = number("CONTEND_DECODER_RUNS", 1);
        let inputs = number("CONTEND_DECODER_INPUTS", 200_000);
        let first = number("CONTEND_SEED", rand::rng().random_range(0..u64::MAX / 2));
        println!("CONTEND_SEED={first}");
        let decoded: u64 = (first..first + runs).map(|seed| fuzz(seed, inputs)).sum();
        println!(
            "{runs} runs of {inputs} inputs: no panic, {decoded} replies decoded within bounds"
        );
    }

    fn fuzz(seed: u64, inputs: u64) -> u64 {
        let path = || "/x".to_owned();
        let requests = [
            Request::create("/x", b"", Mode::Persistent, &[]),
            Request::Exists(path()),
            Request::Data(path()),
            Request::Children(path()),
            Request::Multi {
                check: path(),
                write: Some((path(), Vec::new())),
            },
            Request::Sync,
        ];
        let mut rng = StdRng::seed_from_u64(seed);
        let mut decoded = 0u64;
        for _ in 0..inputs {
            let bytes = frame(&mut rng);
            let mut body = Decoder::new(&bytes);
            let _ = Pass::decode(&bytes);
            if decode_head(&mut body).is_ok() {
                let _ = decode_event(body);
                for request in &requests {
                    if let Ok(Ok(reply)) = request.decode(body) {
                        decoded += 1;
                        // A name takes four bytes on the wire at least, and a `String` and doubling here.
                        assert!(held(&reply) <= 16 * bytes.len() + 128, "seed {seed}");
                    }
                }
            }
            // The same bytes as a stream, with lengths that may lie.
            let mut stream = Vec::new();
            if rng.random_bool(0.5) {
                stream.extend_from_slice(&u32::try_from(bytes.len()).unwrap().to_be_bytes());
            }
            stream.extend_from_slice(&bytes);
            let mut frames = Frames::default();
            let cut = rng.random_range(0..=stream.len());
            for piece in [&stream[..cut], &stream[cut..]] {
                frames.push(piece);
                while let Ok(Some(frame)) = frames.next(MAX_FRAME) {
                    assert!(frame.len() <= stream.len() && frame.len() <= MAX_FRAME);
                }
            }
        }
        assert!(decoded > inputs / 10, "the generator makes only noise");
        decoded
    }

    #[test]
    fn bad_length_is_refused_before_anything_follows() {
        for length in [-1, i32::MIN, MAX_FRAME as i32 + 1] {
            let mut frames = Frames::default();
            frames.push(&length.to_be_bytes());
            assert!(frames.next(MAX_FRAME).is_err(), "{length}");
        }
    }
}
