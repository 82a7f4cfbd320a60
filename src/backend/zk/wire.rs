//! ZooKeeper's encoding (jute): big-endian numbers, length-prefixed bytes, length-prefixed frames.
//!
//! Everything here is bounded: nothing is allocated on the word of a length that came over the wire,
//! and what does not decode is [`Malformed`], never a panic. What the bytes mean is in `message.rs`.

use std::fmt;

/// The largest frame that is taken: the names of a million contenders. A frame in the making never
/// holds more than what has arrived.
pub(super) const MAX_FRAME: usize = 64 << 20;

/// The length of a reply's head.
const HEAD: usize = 16;

/// Bytes that are not what ZooKeeper would say. The connection that brought them is thrown away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed(pub(super) &'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "malformed frame: {}", self.0)
    }
}

impl std::error::Error for Malformed {}

/// Writes frames one after another into one buffer, so that a batch is one system call.
#[derive(Debug, Default)]
pub(super) struct Encoder {
    bytes: Vec<u8>,
    /// Where the frame in the making begins.
    frame: usize,
}

impl Encoder {
    pub(super) fn begin(&mut self) {
        self.frame = self.bytes.len();
        self.int(0);
    }

    /// Fills in the length of the frame in the making.
    pub(super) fn end(&mut self) {
        let length = self.bytes.len().saturating_sub(self.frame + 4);
        let length = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
        if let Some(place) = self.bytes.get_mut(self.frame..self.frame + 4) {
            place.copy_from_slice(&length);
        }
    }

    pub(super) fn bool(&mut self, value: bool) {
        self.bytes.push(u8::from(value));
    }

    pub(super) fn int(&mut self, value: i32) {
        self.bytes.extend_from_slice(&value.to_be_bytes());
    }

    pub(super) fn long(&mut self, value: i64) {
        self.bytes.extend_from_slice(&value.to_be_bytes());
    }

    pub(super) fn buffer(&mut self, value: &[u8]) {
        self.count(value.len());
        self.bytes.extend_from_slice(value);
    }

    pub(super) fn text(&mut self, value: &str) {
        self.buffer(value.as_bytes());
    }

    pub(super) fn texts<'a>(&mut self, values: impl ExactSizeIterator<Item = &'a str>) {
        self.count(values.len());
        for value in values {
            self.text(value);
        }
    }

    pub(super) fn count(&mut self, count: usize) {
        self.int(i32::try_from(count).unwrap_or(i32::MAX));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    #[cfg(test)]
    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Takes what was written, and begins anew.
    pub(super) fn take(&mut self) -> Vec<u8> {
        self.frame = 0;
        std::mem::take(&mut self.bytes)
    }

    pub(super) fn clear(&mut self) {
        self.frame = 0;
        self.bytes.clear();
    }
}

/// Reads the fields of one frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decoder<'a> {
    rest: &'a [u8],
}

impl<'a> Decoder<'a> {
    pub(super) fn new(frame: &'a [u8]) -> Decoder<'a> {
        Decoder { rest: frame }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub(super) fn bool(&mut self) -> Result<bool, Malformed> {
        let (byte, rest) = self.rest.split_first().ok_or(Malformed("no bool left"))?;
        self.rest = rest;
        Ok(*byte != 0)
    }

    pub(super) fn int(&mut self) -> Result<i32, Malformed> {
        let (bytes, rest) = self
            .rest
            .split_first_chunk::<4>()
            .ok_or(Malformed("no int left"))?;
        self.rest = rest;
        Ok(i32::from_be_bytes(*bytes))
    }

    pub(super) fn long(&mut self) -> Result<i64, Malformed> {
        let (bytes, rest) = self
            .rest
            .split_first_chunk::<8>()
            .ok_or(Malformed("no long left"))?;
        self.rest = rest;
        Ok(i64::from_be_bytes(*bytes))
    }

    /// A buffer; the null buffer (length -1) counts as empty.
    pub(super) fn buffer(&mut self) -> Result<&'a [u8], Malformed> {
        let length = match self.int()? {
            -1 => 0,
            length => usize::try_from(length).map_err(|_| Malformed("negative length"))?,
        };
        let (bytes, rest) = self
            .rest
            .split_at_checked(length)
            .ok_or(Malformed("length beyond the frame"))?;
        self.rest = rest;
        Ok(bytes)
    }

    pub(super) fn text(&mut self) -> Result<String, Malformed> {
        std::str::from_utf8(self.buffer()?)
            .map(str::to_owned)
            .map_err(|_| Malformed("text is not UTF-8"))
    }

    /// A list of texts. Grown as they come: the count on the wire reserves nothing.
    pub(super) fn texts(&mut self) -> Result<Vec<String>, Malformed> {
        let count = self.int()?.max(0);
        let mut texts = Vec::new();
        for _ in 0..count {
            texts.push(self.text()?);
        }
        Ok(texts)
    }
}

/// A frame from a server.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// All of it.
    Whole(Vec<u8>),
    /// The head of a frame beyond [`MAX_FRAME`]: enough to know whose answer it was. The rest is
    /// skipped as it arrives, so that one list that is too long does not cost everybody the connection.
    Oversized(Vec<u8>),
}

/// Cuts the stream of bytes from a server into frames.
#[derive(Debug, Default)]
pub(super) struct Frames {
    bytes: Vec<u8>,
    /// How much of `bytes` has been handed out.
    used: usize,
    /// How much of an oversized frame is still to come.
    skip: usize,
}

impl Frames {
    /// Takes what has arrived.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.used);
        self.used = 0;
        let skipped = self.skip.min(bytes.len());
        self.skip -= skipped;
        self.bytes
            .extend_from_slice(bytes.get(skipped..).unwrap_or_default());
    }

    /// The length of the next frame, as far as it has announced one.
    pub(super) fn announced(&self) -> Option<usize> {
        let arrived = self.bytes.get(self.used..).unwrap_or_default();
        let (length, _) = arrived.split_first_chunk::<4>()?;
        usize::try_from(i32::from_be_bytes(*length)).ok()
    }

    /// The next frame that has arrived in full, or the head of one that is too large to be taken.
    pub(super) fn next(&mut self) -> Result<Option<Frame>, Malformed> {
        let arrived = self.bytes.get(self.used..).unwrap_or_default();
        let Some((length, rest)) = arrived.split_first_chunk::<4>() else {
            return Ok(None);
        };
        let length = usize::try_from(i32::from_be_bytes(*length))
            .map_err(|_| Malformed("frame length out of bounds"))?;
        if length > MAX_FRAME {
            let Some(head) = rest.get(..HEAD) else {
                return Ok(None);
            };
            let frame = Frame::Oversized(head.to_vec());
            let here = rest.len().min(length);
            self.skip = length - here;
            self.used += 4 + here;
            return Ok(Some(frame));
        }
        let Some(frame) = rest.get(..length) else {
            return Ok(None);
        };
        let frame = Frame::Whole(frame.to_vec());
        self.used += 4 + length;
        Ok(Some(frame))
    }
}

#[cfg(test)]
pub(super) mod tests {
    //! Nothing that a server can send makes the decoder panic or allocate out of proportion.

    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::super::message::{Event, Head, Mode, Permissions, Reply, Request, Welcome};
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
                4 => out.texts(["a", "", "latch-0000000007"].into_iter()),
                5 => {
                    let noise: Vec<u8> =
                        (0..rng.random_range(0..24)).map(|_| rng.random()).collect();
                    out.buffer(&noise);
                }
                _ => (0..8).for_each(|_| out.long(rng.random())),
            }
        }
        let mut bytes = out.as_bytes().to_vec();
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
        match reply {
            Reply::Created(path, _) => path.capacity(),
            Reply::Data(data, _) => data.capacity(),
            Reply::Children(names) => {
                names.capacity() * size_of::<String>()
                    + names.iter().map(String::capacity).sum::<usize>()
            }
            Reply::Stat(_) | Reply::Nothing | Reply::Line(_) => 0,
        }
    }

    /// `CONTEND_DECODER_RUNS` says how many runs there are (1 by default), `CONTEND_DECODER_INPUTS` how many
    /// inputs each has; `CONTEND_SEED` repeats them.
    #[test]
    fn whatever_arrives_is_decoded_or_refused_within_bounds() {
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
            Request::Create {
                path: path(),
                data: Vec::new(),
                mode: Mode::Persistent,
                permissions: Permissions::Shared,
            },
            Request::Exists(path()),
            Request::Data(path()),
            Request::Children(path()),
            Request::CheckedWrite {
                check: path(),
                path: path(),
                data: Vec::new(),
            },
            Request::Sync,
        ];
        let mut rng = StdRng::seed_from_u64(seed);
        let mut decoded = 0u64;
        for _ in 0..inputs {
            let bytes = frame(&mut rng);
            let mut body = Decoder::new(&bytes);
            let _ = Welcome::decode(&bytes);
            if Head::decode(&mut body).is_ok() {
                let _ = Event::decode(body);
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
                while let Ok(Some(Frame::Whole(frame) | Frame::Oversized(frame))) = frames.next() {
                    assert!(frame.len() <= stream.len() && frame.len() <= MAX_FRAME);
                }
            }
        }
        assert!(decoded > inputs / 10, "the generator makes only noise");
        decoded
    }

    #[test]
    fn a_negative_length_is_refused_before_anything_follows() {
        for length in [-1, i32::MIN] {
            let mut frames = Frames::default();
            frames.push(&length.to_be_bytes());
            assert!(frames.next().is_err(), "{length}");
        }
    }

    /// A list that is too long costs its callers the answer, and nobody the connection.
    #[test]
    fn an_oversized_frame_is_skipped_and_the_next_one_is_read() {
        let mut frames = Frames::default();
        let length = MAX_FRAME + 1000;
        frames.push(&i32::try_from(length).unwrap().to_be_bytes());
        frames.push(&[7; 15]);
        assert_eq!(frames.next(), Ok(None));
        frames.push(&[7; 100]);
        assert_eq!(frames.next(), Ok(Some(Frame::Oversized(vec![7; 16]))));
        assert_eq!(frames.next(), Ok(None));
        let mut rest = length - 115;
        while rest > 0 {
            let piece = rest.min(1 << 20);
            frames.push(&vec![7; piece]);
            assert_eq!(frames.next(), Ok(None));
            rest -= piece;
        }
        frames.push(&[0, 0, 0, 2, 8, 9]);
        assert_eq!(frames.next(), Ok(Some(Frame::Whole(vec![8, 9]))));
    }
}
