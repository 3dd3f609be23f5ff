//! Against the `zeromq` crate, and bytes that nobody should send.

use super::*;
use tokio::io::duplex;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep};
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn message(parts: &[&[u8]]) -> ZmqMessage {
    let parts: Vec<hyper::body::Bytes> = parts.iter().map(|part| part.to_vec().into()).collect();
    parts.try_into().unwrap()
}

#[track_caller]
fn check_endpoint(text: &str, expected: Result<(&str, u16), &str>) {
    let expected = expected.map(|(host, port)| Endpoint::Tcp(host.to_owned(), port));
    assert_eq!(Endpoint::parse(text), expected.map_err(str::to_owned));
}

#[test]
fn endpoints_are_written_as_zeromq_writes_them() {
    check_endpoint("tcp://127.0.0.1:5557", Ok(("127.0.0.1", 5557)));
    check_endpoint("tcp://[::1]:5557", Ok(("::1", 5557)));
    check_endpoint("tcp://*:5557", Ok(("*", 5557)));
    for text in ["", "127.0.0.1:5557", "tcp://:1", "tcp://host", "tcp://host:70000", "ipc://"] {
        let error = format!("{text}: expected tcp://HOST:PORT or ipc://PATH");
        check_endpoint(text, Err(&error));
    }
    let endpoint = Endpoint::parse("tcp://host:65535").unwrap();
    assert_eq!(endpoint.of_rank(0), Ok(endpoint.clone()));
    assert_eq!(endpoint.of_rank(1), Err("no port for rank 1".to_owned()));
    let ipc = Endpoint::parse("ipc:///tmp/x").unwrap();
    assert_eq!(ipc, Endpoint::Ipc("/tmp/x".to_owned()));
    assert!(ipc.of_rank(0).is_ok() && ipc.of_rank(1).is_err());
}

#[test]
fn a_subscriber_hears_a_publisher_and_a_dealer_is_answered() {
    runtime().block_on(async {
        let mut publisher = PubSocket::new();
        let events = publisher.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        let endpoint = Endpoint::parse(&events).unwrap();
        let mut subscriber = endpoint.connect(Role::Subscriber).await.unwrap();
        subscriber.subscribe("kv").await.unwrap();
        let long = vec![7; 100_000];
        let end = Instant::now() + Duration::from_secs(10);
        let heard = loop {
            publisher.send(message(&[b"other", b"x"])).await.unwrap();
            publisher.send(message(&[b"kv-events", &[0; 8], &long])).await.unwrap();
            match timeout(Duration::from_millis(50), subscriber.receive()).await {
                Ok(heard) => break heard.unwrap(),
                Err(_) => assert!(Instant::now() < end, "nothing was heard"),
            }
        };
        assert_eq!(heard, [b"kv-events".to_vec(), vec![0; 8], long]);

        let mut router = RouterSocket::new();
        let replay = router.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        let mut dealer = Endpoint::parse(&replay).unwrap().connect(Role::Dealer).await.unwrap();
        dealer.send(&[b"", &[1; 8]]).await.unwrap();
        let asked = router.recv().await.unwrap().into_vec();
        assert_eq!(asked.len(), 3);
        for answer in [&b"a"[..], b"b"] {
            router.send(message(&[&asked[0], b"", answer])).await.unwrap();
        }
        assert_eq!(dealer.receive().await.unwrap(), [b"".to_vec(), b"a".to_vec()]);
        assert_eq!(dealer.receive().await.unwrap(), [b"".to_vec(), b"b".to_vec()]);
        drop(router);
        let end = dealer.receive().await.unwrap_err();
        assert!(matches!(end.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset));
        // A publisher answers no dealer.
        let refused = endpoint.connect(Role::Dealer).await;
        assert!(refused.is_err());
    });
}

/// What the other end of a connection that sends these bytes is told.
async fn heard(bytes: &[u8]) -> io::Error {
    let (ours, mut theirs) = duplex(1 << 20);
    theirs.write_all(bytes).await.unwrap();
    theirs.shutdown().await.unwrap();
    let introduced = Connection::introduce(Box::new(ours), Role::Subscriber).await;
    match introduced {
        Err(error) => error,
        Ok(mut connection) => loop {
            if let Err(error) = connection.receive().await {
                break error;
            }
        },
    }
}

#[test]
fn bytes_that_are_no_zeromq_end_the_connection() {
    let ready = command(b"READY", &property("Socket-Type", b"PUB"));
    let hello = [&greeting()[..], &ready].concat();
    let mut secured = greeting();
    secured[12..17].copy_from_slice(b"CURVE");
    let mut old = greeting();
    old[10] = 1;
    let many: Vec<u8> = std::iter::repeat_n([MORE, 1, 0], 20).flatten().collect();
    let long = [vec![LONG], (1_u64 << 62).to_be_bytes().to_vec()].concat();
    let router = command(b"READY", &property("Socket-Type", b"ROUTER"));
    let cases: [(Vec<u8>, &str); 9] = [
        (b"GET / HTTP/1.1\r\n".repeat(8), "not ZeroMQ"),
        (secured.to_vec(), "the peer wants a security mechanism"),
        (old.to_vec(), "a version of ZeroMQ before 4"),
        ([&greeting()[..], &router].concat(), "the peer is a ROUTER socket"),
        ([&greeting()[..], &command(b"ERROR", b"\x02no")].concat(), "the peer refused"),
        (
            [&greeting()[..], &command(b"READY", b"\x09")].concat(),
            "the peer does not say what it is",
        ),
        ([&hello[..], &many].concat(), "a message is too long"),
        ([&hello[..], &long].concat(), "a frame of 4611686018427387904 bytes"),
        ([&hello[..], &[0xFF; 100]].concat(), "not a frame"),
    ];
    runtime().block_on(async {
        for (bytes, expected) in cases {
            assert_eq!(heard(&bytes).await.to_string(), expected);
        }
        assert_eq!(heard(&hello).await.kind(), ErrorKind::UnexpectedEof);
    });
}

#[test]
fn a_peer_that_says_nothing_is_given_up() {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_all().start_paused(true).build().unwrap().block_on(async {
        let listener = Endpoint::parse("tcp://127.0.0.1:0").unwrap().listen().await.unwrap();
        let (host, port) = ("127.0.0.1".to_owned(), listener.local_addr().unwrap().port());
        let silent = Endpoint::Tcp(host, port).connect(Role::Subscriber).await;
        assert_eq!(silent.err().unwrap().kind(), ErrorKind::TimedOut);
    });
}

#[test]
fn a_message_in_any_pieces_is_one_and_a_wait_that_is_dropped_loses_nothing() {
    let mut bytes = greeting().to_vec();
    bytes.extend(command(b"READY", &property("socket-type", b"XPUB")));
    bytes.extend(command(b"PING", b"\0\0context"));
    frame(&mut bytes, MORE, b"a");
    frame(&mut bytes, 0, &[5; 300]);
    runtime().block_on(async {
        let (ours, mut theirs) = duplex(1 << 20);
        let introduced = tokio::spawn(Connection::introduce(Box::new(ours), Role::Subscriber));
        let (first, rest) = bytes.split_at(greeting().len() + 33);
        theirs.write_all(first).await.unwrap();
        let mut connection = introduced.await.unwrap().unwrap();
        for byte in rest {
            let dropped = timeout(Duration::from_micros(1), connection.receive()).await;
            assert!(dropped.is_err());
            theirs.write_all(&[*byte]).await.unwrap();
            yield_now().await;
        }
        assert_eq!(connection.receive().await.unwrap(), [b"a".to_vec(), vec![5; 300]]);
        let mut answered = vec![0; 64 + 27];
        theirs.read_exact(&mut answered).await.unwrap();
        let mut pong = vec![0; 2 + 5 + 7];
        theirs.read_exact(&mut pong).await.unwrap();
        assert_eq!(pong, command(b"PONG", b"context"));
        sleep(Duration::ZERO).await;
    });
}
