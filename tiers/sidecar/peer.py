"""Who is at the other end of a Unix socket, and whether that process still lives.

Knows no protocol. A process is watched through its pidfd, which cannot be fooled by a reused pid:
it turns readable when the last thread is gone, and with it every mapping and every DMA.
"""

import os
import socket
from dataclasses import dataclass
from struct import Struct

from kvtier.index.errors import KvtierError

_UCRED = Struct("3i")
# Python names it from 3.14 on; Linux knows it from 6.5 on.
_SO_PEERPIDFD = getattr(socket, "SO_PEERPIDFD", 77)


class PeerRefused(KvtierError):
    """The process at the other end may not talk to us, or is gone already."""


@dataclass(frozen=True)
class Peer:
    """A connected process. `pidfd` belongs to the holder, who closes it."""

    pid: int
    uid: int
    pidfd: int

    @classmethod
    def of(cls, connection: socket.socket, *, uid: int) -> "Peer":
        """Raises `PeerRefused` unless the peer runs as user `uid` and is alive."""
        size = _UCRED.size
        pid, peer_uid, _ = _UCRED.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        if peer_uid != uid:
            raise PeerRefused(f"peer pid {pid}: user {peer_uid} may not use user {uid}'s sidecar")
        return cls(pid, peer_uid, _pidfd(connection, pid))


def _pidfd(connection: socket.socket, pid: int) -> int:
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        # Older kernels: by number. The peer is connected, so its pid was not reused before now
        # unless it died in this instant; then its connection ends at once as well.
        try:
            return os.pidfd_open(pid)
        except OSError as error:
            raise PeerRefused(f"peer pid {pid} is gone: {error.strerror}") from error
    os.set_inheritable(pidfd, False)
    return pidfd
