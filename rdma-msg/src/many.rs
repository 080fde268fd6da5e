//! Several messages at once, for programs that exchange many short ones.

use std::fmt;
use std::future::{Future, poll_fn};
use std::iter::FusedIterator;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::channel::{Channel, Handle, Waiting};
use crate::engine::Waits;
use crate::error::Result;
use crate::message::{Message, Packet};
use crate::wire;

/// The most messages that are added under one lock of the packet.
const CHUNK: usize = 16;

/// Messages that have arrived together: at least one. [`Channel::receive_many`] returns them.
///
/// Dropping them gives their memory back to the channel.
pub struct Messages(Held);

enum Held {
    One(Message),
    Run(Run),
}

/// Whole messages of a packet, one after another.
pub(crate) struct Run {
    pub(crate) packet: Arc<Packet>,
    /// Offset of the first frame in bytes.
    pub(crate) start: usize,
    /// Offset after the last frame in bytes.
    pub(crate) end: usize,
    pub(crate) count: usize,
}

/// The bytes of [`Messages`], in order.
#[derive(Clone)]
pub struct MessagesIter<'m> {
    one: Option<&'m [u8]>,
    packet: &'m [u8],
    at: usize,
    left: usize,
}

impl Messages {
    /// Number of messages.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "there is at least one")]
    pub fn len(&self) -> usize {
        match &self.0 {
            Held::One(_) => 1,
            Held::Run(run) => run.count,
        }
    }

    /// The message, if it came alone: for [`Message::into_offered`] and [`Message::into_vec`], and to send it on without a copy.
    ///
    /// # Errors
    /// The messages, if there are several.
    pub fn into_message(self) -> Result<Message, Self> {
        match self.0 {
            Held::One(message) => Ok(message),
            run @ Held::Run(_) => Err(Messages(run)),
        }
    }

    /// The bytes of each message, in order.
    #[must_use]
    pub fn iter(&self) -> MessagesIter<'_> {
        match &self.0 {
            Held::One(message) => MessagesIter { one: Some(message), packet: &[], at: 0, left: 0 },
            Held::Run(Run { packet, start, end, count }) => {
                let packet = packet.bytes().get(..*end).unwrap_or_default();
                MessagesIter { one: None, packet, at: *start, left: *count }
            }
        }
    }
}

impl From<Message> for Messages {
    fn from(message: Message) -> Self {
        Messages(Held::One(message))
    }
}

impl From<Run> for Messages {
    fn from(run: Run) -> Self {
        Messages(Held::Run(run))
    }
}

impl<'m> IntoIterator for &'m Messages {
    type Item = &'m [u8];
    type IntoIter = MessagesIter<'m>;

    fn into_iter(self) -> MessagesIter<'m> {
        self.iter()
    }
}

impl<'m> Iterator for MessagesIter<'m> {
    type Item = &'m [u8];

    #[inline]
    fn next(&mut self) -> Option<&'m [u8]> {
        if self.left == 0 {
            return self.one.take();
        }
        // The run was checked when it was taken.
        let frame = wire::decode_frame(self.packet, self.at).ok()??;
        (self.at, self.left) = (frame.end(), self.left - 1);
        self.packet.get(frame.start..frame.start + frame.len)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let len = self.left + usize::from(self.one.is_some());
        (len, Some(len))
    }
}

impl ExactSizeIterator for MessagesIter<'_> {}

impl FusedIterator for MessagesIter<'_> {}

impl fmt::Debug for Messages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Messages").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl fmt::Debug for MessagesIter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MessagesIter").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl Channel {
    /// The next messages, at least one; `None` when the peer sends no more.
    ///
    /// It returns up to 128 short messages of one packet together, which costs a fraction of [`Channel::receive`] for each.
    /// The first and the last message of a packet come alone, and so do long messages.
    ///
    /// ```no_run
    /// # async fn example(channel: rdma_msg::Channel) -> rdma_msg::Result<()> {
    /// while let Some(messages) = channel.receive_many().await? {
    ///     for message in &messages {
    ///         println!("{}", String::from_utf8_lossy(message));
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Dropping the future loses no message.
    pub fn receive_many(&self) -> ReceiveMany<'_> {
        ReceiveMany(Waiting::new(self.handle(), Waits::ToReceive))
    }

    /// Sends messages in order, each as [`Channel::send`] sends a slice. Messages of other tasks may come between them.
    ///
    /// Short messages are added to a packet together, which costs a fraction of [`Channel::send`] for each.
    ///
    /// ```no_run
    /// # async fn example(channel: rdma_msg::Channel) -> rdma_msg::Result<()> {
    /// channel.send_many(["one", "two", "three"]).await?;
    /// while let Some(messages) = channel.receive_many().await? {
    ///     channel.send_many(&messages).await?; // an echo
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// If the future is dropped, some of the first messages may have been sent. The message in progress does not arrive. Up to 16
    /// messages are taken from the iterator before the first of them is sent.
    ///
    /// # Errors
    /// Those of [`Channel::send`]. The messages before the failed one have been sent.
    pub async fn send_many<'m, B>(&self, messages: impl IntoIterator<Item = &'m B>) -> Result<()>
    where
        B: AsRef<[u8]> + ?Sized + 'm,
    {
        let (mut messages, mut chunk) = (messages.into_iter(), [&[][..]; CHUNK]);
        let adding = Waiting::new(self.handle(), Waits::ToSend);
        loop {
            // The iterator is user code, so it runs before the packet is locked.
            let mut count = 0;
            for (place, message) in chunk.iter_mut().zip(&mut messages) {
                *place = message.as_ref();
                count += 1;
            }
            let mut rest = &chunk[..count];
            while !rest.is_empty() {
                let added = poll_fn(|context| adding.poll_add_all(context, rest)).await;
                rest = &rest[added..];
                // This one needs the engine.
                if let [next, others @ ..] = rest {
                    self.send(*next).await?;
                    rest = others;
                }
            }
            if count < CHUNK {
                return Ok(());
            }
        }
    }
}

/// The future of [`Channel::receive_many`].
///
/// # Errors
/// After the messages that have arrived, the reason why the channel has ended.
#[must_use = "a future does nothing unless it is polled"]
pub struct ReceiveMany<'c>(Waiting<&'c Handle>);

impl Future for ReceiveMany<'_> {
    type Output = Result<Option<Messages>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll_messages(context)
    }
}

impl fmt::Debug for ReceiveMany<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiveMany").finish_non_exhaustive()
    }
}

const _: () = {
    const fn is_sent<T: Send>() {}
    is_sent::<ReceiveMany<'_>>();
};
