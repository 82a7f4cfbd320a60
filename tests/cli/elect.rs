//! `contend elect`: processes whose output is compared line by line.

use rustix::process::Signal;
use testbed::{RedisServer, TempDir, within};

use crate::program::{HANG, Program, field, number, run};

/// By the times that are printed, no process leads before the last leader has released.
#[test]
fn printed_leaderships_do_not_overlap() {
    within(HANG, || {
        let server = RedisServer::start();
        let start = |id| Program::start(&server.url(), &format!("elect m --id {id} --json"));
        let (mut times, mut fences) = (Vec::new(), Vec::new());
        let mut leader = start(0);
        let mut acquired = leader.says("\"acquired\"");
        for id in 1..5 {
            let mut next = start(id);
            next.says("\"started\"");
            times.push(number(&acquired, "at_ms"));
            fences.push(number(&acquired, "fence"));
            let (code, lines) = leader.terminate();
            assert_eq!(code, 0, "{lines:#?}");
            let [.., released, stopped] = &lines[..] else {
                panic!("{lines:#?}")
            };
            assert_eq!(field(released, "event"), "released");
            assert_eq!(field(stopped, "event"), "stopped");
            assert_eq!(number(released, "fence"), number(&acquired, "fence"));
            times.push(number(released, "at_ms"));
            acquired = next.says("\"acquired\"");
            leader = next;
        }
        assert!(times.is_sorted(), "{times:?}");
        assert!(fences.is_sorted_by(|a, b| a < b), "{fences:?}");
    });
}

/// The command takes the signal too, but it was meant for contend: the command is not started again.
#[test]
fn signal_ends_an_ending_election() {
    within(HANG, || {
        let server = RedisServer::start();
        let folder = TempDir::new();
        let end = folder.path().join("end");
        let script = "trap 'echo told' TERM; echo runs; until [ -e END ]; do sleep 0.05; done";
        let script = script.replace("END", end.to_str().unwrap());
        let url = server.url();
        let mut leader = Program::start_script(&url, "elect m --transition 60s", &script);
        leader.says("runs");
        let (_, status, _) = run(&url, "status m --json");
        let fence = number(&status, "fence");
        assert_eq!(run(&url, &format!("revoke m --fence {fence}")).0, 0);
        leader.says("told");
        leader.signal(Signal::TERM);
        // By the signal that was passed on: contend has it.
        leader.says("told");
        std::fs::write(&end, "").unwrap();
        let (code, lines) = leader.ends();
        assert_eq!(code, 0, "{lines:#?}");
        let runs = lines.iter().filter(|line| *line == "runs").count();
        assert_eq!(runs, 1, "{lines:#?}");
    });
}
