//! Servers that know less than they once told us: restored from an older copy, or started without their
//! data.
//!
//! A server that is behind what a client has seen closes the connection without a word; the client is to
//! find one that is not. Where none is left it would look for ever. So once the session is refused
//! everywhere, and nothing can rest on it any more, it is shown to a server without what we have seen.
//! Then there is an answer: that the session has expired, as a rule. If it is known there, a `sync` tells
//! how far the ensemble's leader is; if that is less than what we have seen, the session is closed. Its
//! watches and our memory of its nodes belong to a past that is gone.

use std::io::Write;
use std::net::TcpStream;

use super::link::{next_frame, unanswered};
use super::message::{Code, Head, Request};
use super::session::Shared;
use super::session_state::SessionState;
use super::state::State;
use super::wire::{Decoder, Encoder, Frames};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// Whether it may be what we have seen that makes every server refuse us: each did so twice, and the
/// session may have expired, so that nobody owns by it and no lease of it runs.
pub(super) fn is_likely(state: &State, now: Moment) -> bool {
    state.id != 0
        && state.refusals >= 2 * state.config.hosts.len()
        && state.pulse.alive_until().is_none_or(|until| until <= now)
}

/// The session was taken up without what we have seen. `true`: there was a setback, and the session is
/// over by our own word. `false`: there was none, and the connection is as good as any. As a rule the
/// servers were starting then, and refused everybody.
pub(super) fn judge(shared: &Shared, stream: &mut TcpStream, frames: &mut Frames) -> Result<bool> {
    let by = Moment::now() + shared.config.connect_timeout;
    let mut ask = |xid: i32, request: Request| {
        let mut out = Encoder::default();
        request.encode(xid, &mut out);
        stream.write_all(out.as_bytes()).map_err(unanswered)?;
        let frame = next_frame(stream, frames, by)?;
        Head::decode(&mut Decoder::new(&frame)).map_err(|what| {
            Error::new(ErrorKind::Protocol, "not a ZooKeeper server's reply").with_source(what)
        })
    };
    // Through the leader: one that merely lags behind has caught up with it after this.
    let sync = ask(1, Request::Sync)?;
    if sync.code != Code::OK {
        return Err(sync.code.error("/"));
    }
    let (theirs, ours) = (sync.zxid, shared.state.lock().last_zxid);
    if theirs >= ours {
        return Ok(false);
    }
    log::error!(
        "{}: the servers have forgotten what they once told us (they are at {theirs:#x}, we have seen \
         {ours:#x}), as after a restore from an older copy; the session is given up for a new one, and \
         fences may come again",
        shared.config.realm,
    );
    // Not waited for in earnest: without it the nodes go when the session times out.
    let _ = ask(2, Request::Close);
    let mut state = shared.state.lock();
    if !state.phase.is_over() {
        state.end(SessionState::Expired);
    }
    shared.changed.notify_all();
    Ok(true)
}
