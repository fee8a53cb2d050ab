"""One client's byte stream on the server: frames in, frames out, hello first, everything bounded.

Whatever breaks the protocol closes this connection and no other. Knows no cache: requests go to the
`Session` that the host makes at hello.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine
from typing import Protocol, cast

import kvtier
from kvtier.index.errors import KvtierError
from kvtier.tiers.sidecar import wire
from kvtier.tiers.sidecar.backend import LayoutRefused, Slab
from kvtier.tiers.sidecar.peer import Peer, PeerRefused
from kvtier.tiers.sidecar.session import Session

log = logging.getLogger(__name__)

MAX_STATS = 16
MAX_UNSENT = 64 << 20
"""A client that lets this many bytes of replies pile up is dropped."""


class Host(Protocol):
    """What a connection asks of the server."""

    def joined(self, connection: "Connection") -> None: ...
    def left(self, connection: "Connection") -> None: ...
    async def slab_for(self, layout: wire.WireLayout) -> Slab: ...
    def session_of(self, connection: "Connection", slab: Slab) -> Session: ...
    async def statistics(self, request_id: int) -> wire.Statistics: ...


class Connection(asyncio.Protocol):
    def __init__(self, host: Host) -> None:
        self._host = host
        self._frames = wire.FrameReader(wire.MAX_HELLO)
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport
        self.peer: Peer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._greeting = False
        self._greeted = False
        self.session: Session | None = None

    # ---- asyncio ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        try:
            with self._socket() as connection:
                self.peer = Peer.of(connection, uid=os.getuid())
        except PeerRefused as error:
            self._drop(error)
        self._host.joined(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._host.left(self)

    def data_received(self, data: bytes) -> None:
        if self.peer is None or self._transport.is_closing():
            return
        try:
            for body in self._frames.feed(data):
                self._frame(body)
        except wire.WireError as error:
            self._drop(error)
        self.flush()

    # ---- out --------------------------------------------------------------------------------

    def send(self, reply: wire.Reply) -> None:
        """Queue a reply; `flush` sends all that are queued in one write."""
        self._unsent.append(wire.encode(reply))

    def flush(self) -> None:
        if not self._unsent:
            return
        data = b"".join(self._unsent)
        self._unsent.clear()
        if self._transport.is_closing():
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > MAX_UNSENT:
            self._drop(wire.WireError(f"{MAX_UNSENT} bytes of replies unread"))

    def abort(self) -> None:
        """End the connection now; `left` follows."""
        self._transport.abort()

    def _drop(self, error: Exception) -> None:
        log.warning("sidecar: closed the connection of %s: %s", self._who(), error)
        self.abort()

    def _who(self) -> str:
        return "an unknown peer" if self.peer is None else f"pid {self.peer.pid}"

    # ---- in ---------------------------------------------------------------------------------

    def _frame(self, body: bytes) -> None:
        if not self._greeted:
            self._first(body)
            return
        request = wire.decode_request(body)
        if isinstance(request, wire.Stats):
            if len(self._tasks) >= MAX_STATS:
                raise wire.WireError(f"more than {MAX_STATS} unanswered stats requests")
            self._start(self._tell_statistics(request.id))
        elif self.session is None:
            raise wire.WireError("an observer may ask for statistics only")
        else:
            self.session.handle(request)

    def _first(self, body: bytes) -> None:
        if self._greeting:
            raise wire.WireError("a frame before hello was answered")
        self._greeting = True
        request_id, version = wire.hello_version(body)
        if version != wire.PROTOCOL_VERSION:
            text = (
                f"this sidecar (kvtier {kvtier.__version__}) speaks protocol "
                f"{wire.PROTOCOL_VERSION}, the client {version}; run the same kvtier on both sides"
            )
            self._refuse_and_close(request_id, wire.Code.VERSION, text)
            return
        hello = wire.decode_request(body)
        if not isinstance(hello, wire.Hello):
            raise wire.WireError("the first frame of a connection must be a hello")
        self._start(self._greet(hello))

    async def _greet(self, hello: wire.Hello) -> None:
        if hello.layout is None:
            self._welcome(hello.id, None)
            return
        try:
            slab = await self._host.slab_for(hello.layout)
        except LayoutRefused as error:
            self._refuse_and_close(hello.id, wire.Code.LAYOUT, str(error))
        except KvtierError as error:
            self._refuse_and_close(hello.id, wire.Code.FULL, str(error))
        else:
            self._welcome(hello.id, slab)

    def _welcome(self, request_id: int, slab: Slab | None) -> None:
        if self._transport.is_closing():
            return
        geometry = (0, 0, 0, 0)
        if slab is not None:
            g = slab.dram.geometry
            geometry = (g.num_slots, g.block_bytes, g.stride, g.data_offset)
            self.session = self._host.session_of(self, slab)
        frame = wire.encode(
            wire.Welcome(request_id, wire.PROTOCOL_VERSION, kvtier.__version__, *geometry)
        )
        self._greeted = True
        self._frames.max_frame = wire.MAX_FRAME
        if slab is None:
            self._transport.write(frame)
            return
        # Nothing was sent yet and the frame is small: one non-blocking send takes it whole.
        with self._socket() as connection:
            sent = socket.send_fds(connection, [frame], [slab.dram.fd])
        if sent != len(frame):
            self._drop(wire.WireError("the welcome did not fit into the socket"))

    async def _tell_statistics(self, request_id: int) -> None:
        self.send(await self._host.statistics(request_id))
        self.flush()

    def _refuse_and_close(self, request_id: int, code: wire.Code, text: str) -> None:
        self._transport.write(wire.encode(wire.Refused(request_id, code, text[: wire.MAX_TEXT])))
        self._transport.close()

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _socket(self) -> socket.socket:
        """A socket object of its own for what asyncio's transport does not offer."""
        return socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))
