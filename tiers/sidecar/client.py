"""One connection to a sidecar: requests out, replies in, the slab mapped. Torch-free.

`connect` blocks for the hello; afterwards no call waits, except `call`. One I/O thread per
connection reads replies and hands each to the handler its request was sent with. Knows no cache and
no pool: what is done with slots is `tier.py`'s.
"""

import logging
import os
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread

from kvtier.index.errors import KvtierError
from kvtier.index.namespace import BlockLayout
from kvtier.tiers.errors import SidecarUnavailable
from kvtier.tiers.sidecar import wire
from kvtier.tiers.sidecar.hello import HELLO_TIMEOUT_S, Greeting, greet

log = logging.getLogger(__name__)

Handler = Callable[[wire.Reply | None], None]
"""Told of each reply to one request; None once: no more will come (connection or deadline ended).

Runs on the I/O thread (or, if the connection is over already, in `send`): it must not wait.
"""

# Deadlines are backstops; they are looked at this often.
_TICK_S = 0.25
# A server that owes a reply and says nothing for so long is asked for a sign of life, which a
# healthy one gives at once; without one for so long, it is taken to hang.
_QUIET_S = 0.25
_SILENT_S = 0.75
# How long a close may take to send what is queued.
_CLOSE_S = 1.0
_READ_BYTES = 256 << 10


@dataclass
class _Pending:
    handler: Handler
    sent_at: float
    deadline: float


class SidecarClient:
    """Made by `connect`. Thread-safe. `slab` is None for an observer; its owner closes it."""

    def __init__(self, greeting: Greeting, on_end: Callable[[], None] | None) -> None:
        self.welcome = greeting.welcome
        self.slab = greeting.slab
        self._socket = greeting.connection
        self._frames = greeting.frames
        self._on_end = on_end
        self._lock = Lock()
        self._next_id = greeting.welcome.id + 1
        self._pending: dict[int, _Pending] = {}
        self._unsent = bytearray()
        self._closing = False
        self._close_by = 0.0
        self._next_look = 0.0
        self._heard_at = time.monotonic()
        self._probed_at: float | None = None
        self._silent = False
        self._ended = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._socket.setblocking(False)
        self._thread = Thread(target=self._run, name="kvtier-sidecar-client", daemon=True)
        self._thread.start()

    @classmethod
    def connect(
        cls,
        socket_path: Path,
        layout: BlockLayout | None,
        *,
        client_name: str,
        timeout_s: float = HELLO_TIMEOUT_S,
        on_end: Callable[[], None] | None = None,
    ) -> "SidecarClient":
        """Say hello and map the slab. Without a layout the client may only ask for statistics.

        `on_end` is called once, on the I/O thread, when the connection is over. Raises
        `SidecarUnavailable` if nobody answers in time or the hello is refused.
        """
        greeting = greet(socket_path, layout, client_name=client_name, timeout_s=timeout_s)
        return cls(greeting, on_end)

    @property
    def ended(self) -> bool:
        """True once the connection is over."""
        return self._ended

    @property
    def silent(self) -> bool:
        """True while the server hangs: what it owed has failed, new requests had better wait.

        Turns false by itself when the server speaks again.
        """
        return self._silent

    # ---- asking -----------------------------------------------------------------------------

    def new_id(self) -> int:
        """An id for one request; an acquire's id names its lease."""
        with self._lock:
            self._next_id += 1
            return self._next_id

    def send(self, request: wire.Request, handler: Handler, *, timeout_s: float) -> None:
        """Send and return; `handler` hears the rest. Raises `WireError` if it is too large."""
        frame = wire.encode(request)
        now = time.monotonic()
        with self._lock:
            over = self._ended or self._closing
            if not over:
                self._pending[request.id] = _Pending(handler, now, now + timeout_s)
                self._unsent += frame
                self._write()
                if self._unsent:
                    self._wake()
        if over:
            handler(None)

    def call(self, request: wire.Request, *, timeout_s: float) -> wire.Reply:
        """Send and wait. Raises `SidecarUnavailable` for no answer, `KvtierError` for a refusal."""
        answered = Event()
        replies: list[wire.Reply | None] = []

        def handler(reply: wire.Reply | None) -> None:
            replies.append(reply)
            answered.set()

        self.send(request, handler, timeout_s=timeout_s)
        answered.wait(timeout_s + 2 * _TICK_S)
        reply = replies[0] if replies else None
        if reply is None:
            raise SidecarUnavailable(
                f"the sidecar gave no answer to {type(request).__name__} within {timeout_s} s; "
                f"is it still running?"
            )
        if isinstance(reply, wire.Refused):
            raise KvtierError(f"the sidecar refused: {reply.text}")
        return reply

    def close(self) -> None:
        """Send what is queued, end the connection, fail what is unanswered. Idempotent."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._close_by = time.monotonic() + _CLOSE_S
            self._wake()
        self._thread.join()

    def _wake(self) -> None:
        """Lock held. The descriptor is gone once the I/O thread has ended."""
        if not self._ended:
            os.eventfd_write(self._wake_fd, 1)

    def _write(self) -> None:
        """Send as much as the socket takes now. Lock held."""
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            # Broken: the I/O thread reads the same and ends the connection.
            sent = len(self._unsent)
        del self._unsent[:sent]

    # ---- the I/O thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                selector.register(self._wake_fd, selectors.EVENT_READ)
                while self._turn(selector):
                    self._expire()
        finally:
            self._end()

    def _turn(self, selector: selectors.BaseSelector) -> bool:
        """Wait for an event and act on it; False when the connection is over."""
        readable = False
        for key, events in selector.select(_TICK_S):
            if key.fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            elif events & selectors.EVENT_READ:
                readable = True
        with self._lock:
            if self._unsent:
                self._write()
            if self._closing and (not self._unsent or time.monotonic() > self._close_by):
                return False
            writing = selectors.EVENT_WRITE if self._unsent else 0
        selector.modify(self._socket, selectors.EVENT_READ | writing)
        return not readable or self._read()

    def _read(self) -> bool:
        try:
            data = self._socket.recv(_READ_BYTES)
            replies = [wire.decode_reply(body) for body in self._frames.feed(data)]
        except BlockingIOError:
            return True
        except OSError:
            return False
        except wire.WireError as error:
            log.warning("sidecar: closed the connection, the server sent %s", error)
            return False
        self._heard_at, self._probed_at, self._silent = time.monotonic(), None, False
        for reply in replies:
            self._dispatch(reply)
        return bool(data)

    def _dispatch(self, reply: wire.Reply) -> None:
        with self._lock:
            final = not isinstance(reply, wire.Progress) or reply.done
            pending = self._pending.pop(reply.id, None) if final else self._pending.get(reply.id)
        if pending is not None:
            pending.handler(reply)
        elif isinstance(reply, wire.Reserved):
            # Nobody waits for these slots any more; the server must not keep them for us.
            unwanted = wire.GiveBack(self.new_id(), reply.slots)
            self.send(unwanted, lambda _: None, timeout_s=_CLOSE_S)

    def _expire(self) -> None:
        """Fail what is past its deadline; everything, if the server gives no sign of life."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _TICK_S
        with self._lock:
            self._probe(now)
            late = [
                number
                for number, pending in self._pending.items()
                if pending.deadline < now or self._silent
            ]
            handlers = [self._pending.pop(number).handler for number in late]
        for handler in handlers:
            handler(None)

    def _probe(self, now: float) -> None:
        """Ask a quiet server for a sign of life, or conclude that it hangs. Lock held."""
        if self._probed_at is not None:
            self._silent = now - self._probed_at > _SILENT_S
        elif self._pending:
            oldest = next(iter(self._pending.values())).sent_at
            if now - max(oldest, self._heard_at) > _QUIET_S:
                self._next_id += 1
                self._unsent += wire.encode(wire.Release(self._next_id, wire.NO_LEASE))
                self._write()
                self._probed_at = now

    def _end(self) -> None:
        with self._lock:
            self._ended = True
            os.close(self._wake_fd)
            self._socket.close()
            handlers = [pending.handler for pending in self._pending.values()]
            self._pending.clear()
        for handler in handlers:
            handler(None)
        if self._on_end is not None:
            self._on_end()


def observe(socket_path: Path, *, timeout_s: float = 5.0) -> wire.Statistics:
    """A running sidecar's counters. Raises `SidecarUnavailable`."""
    client = SidecarClient.connect(socket_path, None, client_name="observer", timeout_s=timeout_s)
    try:
        reply = client.call(wire.Stats(client.new_id()), timeout_s=timeout_s)
    finally:
        client.close()
    if not isinstance(reply, wire.Statistics):
        raise SidecarUnavailable(f"sidecar at {socket_path}: answered stats with {reply!r}")
    return reply
