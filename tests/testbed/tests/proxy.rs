//! Each way in which a proxy misbehaves.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use testbed::{Direction, Proxy, wait_until, within};

const LIMIT: Duration = Duration::from_secs(60);
/// Long enough for bytes to arrive that should not.
const SILENCE: Duration = Duration::from_millis(150);

/// A proxy in front of a server that sends back what it gets.
fn echo() -> Proxy {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            stream.set_nodelay(true).unwrap();
            thread::spawn(move || std::io::copy(&mut &stream, &mut &stream));
        }
    });
    Proxy::to(addr)
}

/// One connection through it that has passed.
fn connected() -> (Proxy, TcpStream) {
    let proxy = echo();
    let stream = client(&proxy);
    echoes(&stream, "a");
    (proxy, stream)
}

fn client(proxy: &Proxy) -> TcpStream {
    let stream = TcpStream::connect(proxy.addr()).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

fn says(mut stream: &TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).unwrap();
}

fn hears(mut stream: &TcpStream, text: &str) {
    let mut reply = vec![0; text.len()];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(String::from_utf8_lossy(&reply), text);
}

fn echoes(stream: &TcpStream, text: &str) {
    says(stream, text);
    hears(stream, text);
}

fn hears_nothing(mut stream: &TcpStream) {
    stream.set_read_timeout(Some(SILENCE)).unwrap();
    let error = stream
        .read(&mut [0; 1])
        .expect_err("nothing, not even an end");
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    stream.set_read_timeout(Some(LIMIT)).unwrap();
}

fn is_closed(mut stream: &TcpStream) {
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
}

/// Tests that end by themselves.
macro_rules! tests {
    ($(fn $name:ident() $body:block)+) => {$(
        #[test]
        fn $name() {
            within(2 * LIMIT, || $body);
        }
    )+};
}

tests! {
    fn it_passes_and_counts() {
        let proxy = echo();
        let (one, two) = (client(&proxy), client(&proxy));
        says(&one, "hello");
        echoes(&two, "you");
        hears(&one, "hello");
        assert_eq!((proxy.accepted(), proxy.live()), (2, 2));
        assert_eq!((proxy.bytes_to_server(), proxy.bytes_to_client()), (8, 8));
        drop(one);
        wait_until(LIMIT, "one connection is left", || proxy.live() == 1);
        assert_eq!(proxy.accepted(), 2);
    }

    fn cut_closes_live_connections_alone() {
        let (proxy, stream) = connected();
        proxy.cut();
        is_closed(&stream);
        assert_eq!(proxy.live(), 0);
        echoes(&client(&proxy), "b");
    }

    fn reset_is_seen_as_a_reset() {
        let (proxy, stream) = connected();
        proxy.reset();
        let error = (&stream).read(&mut [0; 1]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }

    fn refuse_refuses_new_connections_alone() {
        let (proxy, stream) = connected();
        for _ in 0..3 {
            proxy.refuse();
            let error = TcpStream::connect(proxy.addr()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
            echoes(&stream, "b");
            proxy.pass();
            echoes(&client(&proxy), "c");
        }
    }

    fn black_hole_holds_one_way() {
        for (direction, arrives) in [(Direction::ToServer, 1), (Direction::ToClient, 2)] {
            let (proxy, stream) = connected();
            proxy.black_hole(direction);
            says(&stream, "b");
            hears_nothing(&stream);
            assert_eq!(proxy.bytes_to_server(), arrives, "{direction:?}");
            proxy.pass();
            hears(&stream, "b");
        }
    }

    fn black_hole_keeps_new_connections() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let proxy = Proxy::to(listener.local_addr().unwrap());
        proxy.black_hole(Direction::ToClient);
        let stream = client(&proxy);
        hears_nothing(&stream);
        assert!(listener.accept().is_err());
        proxy.pass();
        wait_until(LIMIT, "it came through", || listener.accept().is_ok());
    }

    fn delay_is_added_in_order() {
        let (proxy, stream) = connected();
        let each_way = Duration::from_millis(100);
        proxy.delay(each_way);
        let start = Instant::now();
        for text in ["one ", "two ", "three ", "four"] {
            says(&stream, text);
            // So that each is a piece of its own.
            thread::sleep(Duration::from_millis(20));
        }
        hears(&stream, "one two three four");
        assert!(start.elapsed() >= 2 * each_way + Duration::from_millis(60));
        proxy.pass();
        let start = Instant::now();
        echoes(&stream, "five");
        // Only the lower bounds are promised on a busy machine; this one is a matter of 0.1 ms.
        assert!(start.elapsed() < Duration::from_secs(10));
    }

    fn replies_alone_are_delayed() {
        let proxy = echo();
        let stream = client(&proxy);
        proxy.delay_replies(Duration::from_millis(300));
        let began = Instant::now();
        says(&stream, "hello");
        wait_until(LIMIT, "the request has arrived", || proxy.bytes_to_server() == 5);
        let there = began.elapsed();
        hears(&stream, "hello");
        let back = began.elapsed();
        assert!(back >= Duration::from_millis(300) && back > there, "{there:?} {back:?}");
    }

    fn reply_is_lost_once() {
        let proxy = echo();
        let (one, two) = (client(&proxy), client(&proxy));
        proxy.lose_reply_to(b"COMMIT");
        echoes(&one, "BEGIN");
        says(&two, "the COMMIT");
        is_closed(&two);
        assert_eq!(proxy.lost_replies(), 1);
        assert_eq!(proxy.bytes_to_server(), 15, "the request did arrive");
        echoes(&one, "COMMIT");
        proxy.lose_next_reply();
        says(&one, "x");
        is_closed(&one);
        assert_eq!(proxy.lost_replies(), 2);
    }

    fn dropped_proxy_leaves_nothing_in_any_weather() {
        let settings: [fn(&Proxy); 5] = [
            Proxy::pass,
            Proxy::refuse,
            |proxy| proxy.delay(LIMIT),
            |proxy| proxy.black_hole(Direction::Both),
            |proxy| proxy.black_hole(Direction::ToClient),
        ];
        for set in settings {
            let (proxy, stream) = connected();
            let addr = proxy.addr();
            set(&proxy);
            says(&stream, "b");
            drop(proxy);
            // A "b" that passed is read first.
            let mut rest = Vec::new();
            (&stream).read_to_end(&mut rest).unwrap();
            let gone = TcpStream::connect(addr).unwrap_err();
            assert_eq!(gone.kind(), ErrorKind::ConnectionRefused);
        }
    }

    fn garbling_proxy_changes_what_the_server_sends() {
        const TEXT: &str = "the quick brown fox jumps over the lazy dog";
        let proxy = echo();
        proxy.garble(1_000, 7);
        let changed = (0..20).filter(|_| {
            let stream = client(&proxy);
            says(&stream, TEXT);
            let mut reply = [0; 256];
            let count = (&stream).read(&mut reply).unwrap();
            reply[..count] != *TEXT.as_bytes()
        });
        let changed = changed.count();
        assert!(changed > 15, "{changed} of 20");
        proxy.pass();
        echoes(&client(&proxy), "hello");
    }
}
