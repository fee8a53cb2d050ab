"""A client's hello: connect, agree on version and layout, receive and map the slab. It blocks.

Nothing here outlives the call but what it returns.
"""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from kvtier.index.errors import KvtierError
from kvtier.index.namespace import BlockLayout
from kvtier.tiers.dram import DramSlab
from kvtier.tiers.errors import SidecarUnavailable
from kvtier.tiers.sidecar import wire

HELLO_TIMEOUT_S = 60.0
"""The first hello makes the slab: the server fills gigabytes with pages before it answers."""
_READ_BYTES = 64 << 10


@dataclass(frozen=True)
class Greeting:
    """A connection after its hello. `frames` has seen nothing beyond the welcome."""

    connection: socket.socket
    welcome: wire.Welcome
    slab: DramSlab | None
    frames: wire.FrameReader


def greet(
    socket_path: Path, layout: BlockLayout | None, *, client_name: str, timeout_s: float
) -> Greeting:
    """Raises `SidecarUnavailable` if nobody answers in time, or the hello is refused."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds: list[int] = []
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(socket_path))
        frames, welcome = _exchange(connection, layout, client_name, fds)
        slab = _map(fds, welcome, layout)
    except BaseException as error:
        connection.close()
        for fd in fds:
            os.close(fd)
        if isinstance(error, OSError | wire.WireError | KvtierError):
            raise _unavailable(socket_path, error, timeout_s) from error
        raise
    return Greeting(connection, welcome, slab, frames)


def _exchange(
    connection: socket.socket, layout: BlockLayout | None, client_name: str, fds: list[int]
) -> tuple[wire.FrameReader, wire.Welcome]:
    """Exchange hello and welcome; descriptors that came along are appended to `fds`."""
    wanted = None if layout is None else wire.WireLayout.of(layout)
    hello = wire.Hello(1, wire.PROTOCOL_VERSION, wanted, client_name[: wire.MAX_NAME])
    connection.sendall(wire.encode(hello))
    frames = wire.FrameReader()
    bodies: list[bytes] = []
    while not bodies:
        data, received, _, _ = socket.recv_fds(connection, _READ_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        fds += received
        if not data:
            raise wire.WireError("it closed the connection before it answered the hello")
        bodies = frames.feed(data)
    reply = wire.decode_reply(bodies[0])
    if isinstance(reply, wire.Refused):
        raise wire.WireError(reply.text)
    if len(bodies) > 1 or not isinstance(reply, wire.Welcome):
        raise wire.WireError("it answered the hello with something else")
    return frames, reply


def _map(fds: list[int], welcome: wire.Welcome, layout: BlockLayout | None) -> DramSlab | None:
    """The slab behind the descriptor that came with the welcome. Takes the descriptor out."""
    if layout is None:
        return None
    if len(fds) != 1:
        raise wire.WireError(f"it sent {len(fds)} descriptors instead of the slab's")
    slab = DramSlab.attach(fds.pop(), populate=True)
    geometry = slab.geometry
    told = (welcome.num_slots, welcome.block_bytes, welcome.stride, welcome.data_offset)
    found = (geometry.num_slots, geometry.block_bytes, geometry.stride, geometry.data_offset)
    if told != found or geometry.block_bytes != layout.nbytes:
        slab.close()
        raise wire.WireError(f"its slab is {found}, its welcome says {told}")
    return slab


def _unavailable(path: Path, error: Exception, timeout_s: float) -> SidecarUnavailable:
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return SidecarUnavailable(
            f"no sidecar at {path}: start one with `kvtier serve --socket {path}`"
        )
    if isinstance(error, TimeoutError):
        return SidecarUnavailable(
            f"sidecar at {path}: no answer to the hello within {timeout_s} s; restart it"
        )
    if isinstance(error, PermissionError):
        return SidecarUnavailable(
            f"sidecar at {path}: belongs to another user; start one of your own"
        )
    return SidecarUnavailable(f"sidecar at {path}: {error}")
