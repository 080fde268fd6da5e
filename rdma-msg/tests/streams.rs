//! Streams over soft0.

#[path = "../../rdma-async/tests/support/mod.rs"]
mod support;

use std::future::{Future, poll_fn};
use std::io::ErrorKind;
use std::pin::pin;
use std::task::Poll;

use futures_util::SinkExt;
use rdma_msg::{Connector, Error, Incompatible, Listener, ListenerBuilder, Stream};
use support::random::Random;
use support::{begin, soft0, soon, until};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_stream::StreamExt;
use tokio_util::codec::{Framed, LengthDelimitedCodec};

/// Two ends of a stream.
async fn pair(
    connector: impl Fn(Connector) -> Connector,
    listener: impl Fn(ListenerBuilder) -> ListenerBuilder,
) -> [Stream; 2] {
    let listener = listener(Listener::builder()).bind_streams("127.0.0.1:0").await.unwrap();
    let connector = connector(Connector::new().unwrap());
    let connect = connector.connect_stream(listener.local_address());
    let (client, server) = soon(async { tokio::join!(connect, listener.accept()) }).await;
    [client.unwrap(), server.unwrap()]
}

async fn default_pair() -> [Stream; 2] {
    pair(|connector| connector, |listener| listener).await
}

/// Writes `len` random bytes in random pieces, and ends.
async fn write_random(mut stream: impl AsyncWrite + Unpin, seed: u64, len: usize) {
    let (mut random, mut pieces) = (Random::new(seed), Random::new(!seed));
    let bytes: Vec<u8> = (0..len).map(|_| random.below(256) as u8).collect();
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        let (piece, after) = rest.split_at(pieces.index(rest.len().min(40_000)) + 1);
        stream.write_all(piece).await.unwrap();
        if pieces.below(4) == 0 {
            stream.flush().await.unwrap();
        }
        rest = after;
    }
    stream.shutdown().await.unwrap();
}

/// Reads the bytes of `write_random` in random pieces.
async fn read_random(mut stream: impl AsyncRead + Unpin, seed: u64, len: usize) {
    let (mut random, mut pieces) = (Random::new(seed), Random::new(seed + 1));
    let mut total = 0;
    let mut buffer = vec![0; 20_000];
    loop {
        let wanted = pieces.index(buffer.len()) + 1;
        let read = stream.read(&mut buffer[..wanted]).await.unwrap();
        if read == 0 {
            break;
        }
        assert!(buffer[..read].iter().all(|byte| *byte == random.below(256) as u8), "after {total} bytes");
        total += read;
    }
    assert_eq!(total, len);
}

#[tokio::test]
async fn random_pieces_arrive_in_both_directions_at_once() {
    let _soft = soft0();
    const LEN: usize = 1_500_000;
    for seed in 0..4 {
        let window = seed as u32 + 1;
        let [client, server] =
            pair(|connector| connector.window(window).sends(1), |listener| listener.window(window * 3)).await;
        let ((client_read, client_write), (server_read, server_write)) = (client.into_split(), server.into_split());
        let tasks = [
            tokio::spawn(write_random(client_write, seed, LEN)),
            tokio::spawn(write_random(server_write, seed + 100, LEN)),
            tokio::spawn(read_random(server_read, seed, LEN)),
            tokio::spawn(read_random(client_read, seed + 100, LEN)),
        ];
        for task in tasks {
            soon(task).await.unwrap();
        }
    }
}

#[tokio::test]
async fn one_direction_goes_on_while_nobody_reads_the_other() {
    let _soft = soft0();
    let [mut client, mut server] = default_pair().await;
    // Fills the direction to the server, which never reads: its window, which is that of both ends, and the open packet.
    let window = u64::from(client.statistics().window);
    let mut has_room = true;
    while has_room || client.statistics().packets_sent < window {
        let full = [7; 8000];
        let mut write = pin!(client.write(&full));
        has_room = poll_fn(|context| Poll::Ready(write.as_mut().poll(context).is_ready())).await;
        tokio::task::yield_now().await;
    }
    let sender = tokio::spawn(async move {
        for _ in 0..1000 {
            server.write_all(&[9; 3000]).await.unwrap();
        }
        server
    });
    let mut buffer = vec![0; 3_000_000];
    soon(client.read_exact(&mut buffer)).await.unwrap();
    assert!(buffer.iter().all(|byte| *byte == 9));
    let mut server = soon(sender).await.unwrap();
    soon(server.read_exact(&mut buffer[..100])).await.unwrap();
    assert_eq!(buffer[..100], [7; 100]);
}

#[tokio::test]
async fn two_streams_copy_each_other_to_the_end() {
    let _soft = soft0();
    let [client, near] = default_pair().await;
    let [far, server] = default_pair().await;
    let proxy = tokio::spawn(async move {
        let (mut near, mut far) = (near, far);
        tokio::io::copy_bidirectional(&mut near, &mut far).await.unwrap()
    });
    let ((client_read, client_write), (server_read, server_write)) = (client.into_split(), server.into_split());
    let tasks = [
        tokio::spawn(write_random(client_write, 1, 700_000)),
        tokio::spawn(write_random(server_write, 2, 300_000)),
        tokio::spawn(read_random(server_read, 1, 700_000)),
        tokio::spawn(read_random(client_read, 2, 300_000)),
    ];
    for task in tasks {
        soon(task).await.unwrap();
    }
    assert_eq!(soon(proxy).await.unwrap(), (700_000, 300_000));
}

#[tokio::test]
async fn bytes_are_read_by_line_and_in_place() {
    let _soft = soft0();
    let [mut client, mut server] = default_pair().await;
    client.write_all(b"first line\nsecond line\nrest").await.unwrap();
    let list = [b" and".as_slice(), b" more"].map(std::io::IoSlice::new);
    assert_eq!(client.write_vectored(&list).await.unwrap(), 9);
    let mut line = String::new();
    soon(server.read_line(&mut line)).await.unwrap();
    assert_eq!(line, "first line\n");
    let rest = soon(server.chunk()).await.unwrap().unwrap();
    assert_eq!(*rest, *b"second line\nrest");
    let more = soon(server.chunk()).await.unwrap().unwrap();
    assert!(*more == *b" and more" && more.is_in_place());
}

#[tokio::test]
async fn a_dropped_writer_ends_its_direction_only() {
    let _soft = soft0();
    let [client, server] = default_pair().await;
    let (mut client_read, mut client_write) = client.into_split();
    client_write.write_all(b"question").await.unwrap();
    drop(client_write);
    let (mut server_read, mut server_write) = server.into_split();
    let mut question = String::new();
    soon(server_read.read_to_string(&mut question)).await.unwrap();
    assert_eq!(question, "question");
    server_write.write_all(b"answer").await.unwrap();
    soon(server_write.shutdown()).await.unwrap();
    assert_eq!(server_write.write(b"late").await.unwrap_err().kind(), ErrorKind::BrokenPipe);
    let mut answer = String::new();
    soon(client_read.read_to_string(&mut answer)).await.unwrap();
    assert_eq!(answer, "answer");
}

#[tokio::test]
async fn a_lost_peer_is_no_end_of_the_stream() {
    let _soft = soft0();
    let [mut client, server] = pair(|connector| connector, |listener| listener.window(1)).await;
    client.write_all(&[1; 8000]).await.unwrap();
    client.write_all(&[1; 8000]).await.unwrap();
    let mut ended = Box::pin(server.ended());
    begin(ended.as_mut()).await;
    drop(client);
    // Nobody reads or writes.
    assert!(matches!(soon(ended).await, Error::Disconnected));
    let (mut read, mut write) = server.into_split();
    let error = soon(read.read_to_end(&mut Vec::new())).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(error.get_ref().unwrap().to_string().contains("messages may be missing"), "{error}");
    let error = soon(write.write_all(b"more")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn a_stream_and_a_channel_do_not_fit_together() {
    let _soft = soft0();
    let listener = Listener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_address();
    // The wrong peer is skipped, and the next one accepted.
    let accepting = tokio::spawn(async move { listener.accept().await });
    let refused = soon(rdma_msg::connect_stream(address)).await.unwrap_err();
    assert!(matches!(refused, Error::Incompatible(Incompatible::Purpose)));
    let client = soon(rdma_msg::connect(address)).await.unwrap();
    let server = soon(accepting).await.unwrap().unwrap();
    client.send("works").await.unwrap();
    assert_eq!(*soon(server.receive()).await.unwrap().unwrap(), *b"works");
}

#[tokio::test]
async fn an_end_without_this_protocol_is_named() {
    let _soft = soft0();
    let listener = rdma_async::Listener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_address();
    let (refused, _accepted) = soon(async { tokio::join!(rdma_msg::connect(address), listener.accept()) }).await;
    assert!(matches!(refused.unwrap_err(), Error::Incompatible(Incompatible::OtherProtocol)));
}

#[cfg(feature = "futures")]
#[tokio::test]
async fn the_traits_of_futures_read_and_write_the_same_bytes() {
    use std::pin::Pin;

    use futures_io::{AsyncBufRead, AsyncRead, AsyncWrite};

    let _soft = soft0();
    let [mut client, mut server] = default_pair().await;
    let list = [b"one ".as_slice(), b"two "].map(std::io::IoSlice::new);
    let write = poll_fn(|context| AsyncWrite::poll_write_vectored(Pin::new(&mut client), context, &list));
    assert_eq!(soon(write).await.unwrap(), 8);
    let write = poll_fn(|context| AsyncWrite::poll_write(Pin::new(&mut client), context, b"three"));
    assert_eq!(soon(write).await.unwrap(), 5);
    soon(poll_fn(|context| AsyncWrite::poll_flush(Pin::new(&mut client), context))).await.unwrap();
    soon(poll_fn(|context| AsyncWrite::poll_close(Pin::new(&mut client), context))).await.unwrap();
    let mut all = Vec::new();
    let first = poll_fn(|context| {
        AsyncBufRead::poll_fill_buf(Pin::new(&mut server), context).map_ok(|bytes| bytes[..2].to_vec())
    });
    all.extend(soon(first).await.unwrap());
    AsyncBufRead::consume(Pin::new(&mut server), 2);
    loop {
        let mut part = [0; 3];
        let read = soon(poll_fn(|context| AsyncRead::poll_read(Pin::new(&mut server), context, &mut part))).await;
        match read.unwrap() {
            0 => break,
            len => all.extend(&part[..len]),
        }
    }
    assert_eq!(all, b"one two three");
}

#[tokio::test]
async fn what_the_peer_wrote_last_is_read_after_a_flush() {
    let _soft = soft0();
    let [mut client, mut server] = default_pair().await;
    server.write_all(b"last words").await.unwrap();
    soon(server.shutdown()).await.unwrap();
    drop(server);
    // Until this end knows that the connection has ended.
    let ended = async {
        while client.write(b"unread").await.is_ok() {
            tokio::task::yield_now().await
        }
    };
    soon(ended).await;
    client.flush().await.unwrap();
    let mut words = String::new();
    soon(client.read_to_string(&mut words)).await.unwrap();
    assert_eq!(words, "last words");
}

#[tokio::test]
async fn a_shutdown_after_the_peer_has_left_in_order_succeeds() {
    let _soft = soft0();
    let [mut client, mut server] = default_pair().await;
    client.write_all(b"request").await.unwrap();
    soon(server.read_exact(&mut [0; 7])).await.unwrap();
    soon(server.shutdown()).await.unwrap();
    soon(client.read_to_end(&mut Vec::new())).await.unwrap();
    drop(server);
    until("the end is noticed", || client.error().is_some()).await;
    soon(client.shutdown()).await.unwrap();
    assert!(client.write(b"more").await.is_err());
}

#[tokio::test]
async fn a_shutdown_succeeds_although_the_end_of_the_peer_is_unread() {
    let _soft = soft0();
    let [mut client, mut server] = default_pair().await;
    client.write_all(b"question").await.unwrap();
    soon(server.read_exact(&mut [0; 8])).await.unwrap();
    server.write_all(b"answer").await.unwrap();
    soon(server.shutdown()).await.unwrap();
    drop(server);
    until("the end is noticed", || client.error().is_some()).await;
    soon(client.shutdown()).await.unwrap();
    let mut answer = String::new();
    soon(client.read_to_string(&mut answer)).await.unwrap();
    assert_eq!(answer, "answer");
}

#[tokio::test]
async fn frames_of_a_codec_arrive_in_both_directions() {
    let _soft = soft0();
    const COUNT: usize = 60;
    let len = |number: usize| number * 7919 % 60_000;
    let exchange = async |stream: Stream, own: u8, peers: u8| {
        let (mut sink, mut frames) =
            futures_util::StreamExt::split::<bytes::Bytes>(Framed::new(stream, LengthDelimitedCodec::new()));
        let send = async {
            for number in 0..COUNT {
                sink.send(vec![own; len(number)].into()).await.unwrap();
            }
        };
        let receive = async {
            for number in 0..COUNT {
                let frame = frames.next().await.unwrap().unwrap();
                assert!(frame.len() == len(number) && frame.iter().all(|byte| *byte == peers), "{number}");
            }
        };
        tokio::join!(send, receive);
        sink.close().await.unwrap();
        assert!(frames.next().await.is_none());
    };
    let [client, server] = default_pair().await;
    soon(async { tokio::join!(exchange(client, 1, 2), exchange(server, 2, 1)) }).await;
}
