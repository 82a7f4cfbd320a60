//! Nothing that a server can send makes the decoder panic or allocate out of proportion.
//!
//! `CONTEND_DECODER_INPUTS` says how many inputs are tried (200,000 by default); `CONTEND_SEED`
//! repeats a run.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::message::{Event, Head, Mode, Permissions, Reply, Request, Shape, Welcome};
use super::wire::{Decoder, Encoder, Frame, Frames, MAX_FRAME};

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .ok()
        .map_or(default, |text| text.parse().expect("a number"))
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
                let noise: Vec<u8> = (0..rng.random_range(0..24)).map(|_| rng.random()).collect();
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

#[test]
fn whatever_arrives_is_decoded_or_refused_within_bounds() {
    let inputs = number("CONTEND_DECODER_INPUTS", 200_000);
    let seed = number("CONTEND_SEED", rand::rng().random());
    println!("CONTEND_SEED={seed} CONTEND_DECODER_INPUTS={inputs}");
    let mut rng = StdRng::seed_from_u64(seed);
    let mut decoded = 0u64;
    for _ in 0..inputs {
        let bytes = frame(&mut rng);
        let mut body = Decoder::new(&bytes);
        let _ = Welcome::decode(&bytes);
        if Head::decode(&mut body).is_ok() {
            let _ = Event::decode(body);
            for shape in [
                Shape::Created,
                Shape::Stat,
                Shape::Data,
                Shape::Children,
                Shape::CheckedWrite,
                Shape::Nothing,
            ] {
                if let Ok(Ok(reply)) = shape.decode(body) {
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

#[test]
fn frames_come_out_whole_however_they_are_cut() {
    let mut out = Encoder::default();
    for xid in 1..=20 {
        Request::Create {
            path: "/x".repeat(xid as usize),
            data: vec![7; 1000 * xid as usize],
            mode: Mode::Container,
            permissions: Permissions::Shared,
        }
        .encode(xid, false, &mut out);
    }
    for step in [1, 3, 4, 1000, 100_000] {
        let mut frames = Frames::default();
        let mut xids = Vec::new();
        for piece in out.as_bytes().chunks(step) {
            frames.push(piece);
            while let Some(Frame::Whole(frame)) = frames.next().unwrap() {
                xids.push(Decoder::new(&frame).int().unwrap());
            }
        }
        assert_eq!(xids, (1..=20).collect::<Vec<_>>());
    }
}
