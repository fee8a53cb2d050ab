"""The sidecar process: listens on a Unix socket and serves every engine of one user on this host.

One thread runs everything that decides. Knows the socket file, who is connected and whose process
is gone; frames are `connection.py`, requests `session.py`, what all share `backend.py`. No torch.
"""

import asyncio
import fcntl
import os
import socket
from pathlib import Path

from kvtier.index.errors import KvtierError
from kvtier.index.policies import DEFAULT_POLICY
from kvtier.tiers.sidecar import wire
from kvtier.tiers.sidecar.backend import Backend, Slab, flatten
from kvtier.tiers.sidecar.connection import Connection
from kvtier.tiers.sidecar.session import Session
from kvtier.tiers.writeback import WRITEBACK_S

BACKLOG = 128


class SocketTaken(KvtierError):
    """The socket's path cannot be used: another sidecar has it, or it is no socket."""


class SidecarServer:
    """Serves from `start` to `stop`.

    `client_share`: the part of the slab that one connection may hold. `drain_s`: how long a stop
    may write blocks down that only DRAM holds. `writeback_s`: see `TieredCache`;
    `write_budget_bytes`: see `NvmeTier.open`. `dram_policy`: one of `kvtier.index.policies`.
    `nvme_admission`: "all", or "learned" (`Admission`).
    """

    def __init__(
        self,
        socket_path: Path,
        store_path: Path | None,
        *,
        dram_bytes: int,
        nvme_bytes: int,
        codec: str = "raw",
        client_share: float = 0.5,
        drain_s: float = 30.0,
        writeback_s: float | None = WRITEBACK_S,
        write_budget_bytes: int | None = None,
        dram_policy: str = DEFAULT_POLICY,
        nvme_admission: str = "all",
    ) -> None:
        self._socket_path = socket_path
        self._store_path = store_path
        self._dram_bytes = dram_bytes
        self._nvme_bytes = nvme_bytes
        self._codec = codec
        self._client_share = client_share
        self._drain_s = drain_s
        self._writeback_s = writeback_s
        self._write_budget_bytes = write_budget_bytes
        self._dram_policy = dram_policy
        self._nvme_admission = nvme_admission
        self._connections: set[Connection] = set()
        self._watched: set[int] = set()  # pidfds of processes that are, or were, connected
        self._quarantine: dict[int, Session] = {}  # by the pidfd of its process
        self._listener: asyncio.Server | None = None
        self._lock_fd = -1
        self.backend: Backend

    def __repr__(self) -> str:
        store = self._store_path or "no store"
        return f"socket {self._socket_path}, {self._dram_bytes} bytes of DRAM, {store}"

    async def start(self) -> None:
        """Open the store, then listen. Raises `SocketTaken` and what `NvmeTier.open` raises."""
        listening = self._bind()
        try:
            self.backend = Backend(
                self._store_path,
                dram_bytes=self._dram_bytes,
                nvme_bytes=self._nvme_bytes,
                codec=self._codec,
                after_news=self._flush_all,
                writeback_s=self._writeback_s,
                write_budget_bytes=self._write_budget_bytes,
                dram_policy=self._dram_policy,
                nvme_admission=self._nvme_admission,
            )
        except BaseException:
            listening.close()
            self._unlink()
            raise
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_unix_server(
            lambda: Connection(self), sock=listening, backlog=BACKLOG
        )

    def _bind(self) -> socket.socket:
        path = self._socket_path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The lock, not the socket file, says who serves: a dead server leaves the file behind.
        lock = path.with_name(path.name + ".lock")
        self._lock_fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock_fd)
            raise SocketTaken(
                f"a sidecar already answers at {path}; stop it or choose another --socket"
            ) from error
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if path.is_socket():
                path.unlink()
            # Set before bind, the mode is the socket file's from its first instant.
            os.fchmod(listening.fileno(), 0o600)
            listening.bind(str(path))
        except OSError as error:
            listening.close()
            os.close(self._lock_fd)
            raise SocketTaken(
                f"socket {path}: {error.strerror or error}; choose another --socket"
            ) from error
        return listening

    def _unlink(self) -> None:
        self._socket_path.unlink(missing_ok=True)
        os.close(self._lock_fd)

    async def stop(self) -> None:
        """Part from every client, write DRAM down to the store, close it, remove the socket."""
        if self._listener is not None:
            self._listener.close()
        for connection in tuple(self._connections):
            connection.abort()
        while self._connections:
            await asyncio.sleep(0)
        for pidfd, session in self._quarantine.items():
            self._forget(pidfd)
            session.free()
        self._quarantine.clear()
        try:
            await self.backend.close(self._drain_s)
        finally:
            self._unlink()

    # ---- connections ------------------------------------------------------------------------

    def joined(self, connection: Connection) -> None:
        self._connections.add(connection)
        if connection.peer is not None:
            pidfd = connection.peer.pidfd
            self._watched.add(pidfd)
            asyncio.get_running_loop().add_reader(pidfd, self._gone, pidfd, connection)

    def _gone(self, pidfd: int, connection: Connection) -> None:
        """A client's process has ended. A child of its may still hold the connection open."""
        self._forget(pidfd)
        session = self._quarantine.pop(pidfd, None)
        if session is not None:
            session.free()
        else:
            connection.abort()

    def left(self, connection: Connection) -> None:
        """A connection has ended. What its client may still touch waits for its process's end."""
        self._connections.discard(connection)
        session, peer = connection.session, connection.peer
        if session is not None:
            session.leave()
        if peer is None:
            return
        watched = peer.pidfd in self._watched
        if session is not None:
            if watched and session.held_blocks:
                self._quarantine[peer.pidfd] = session
                return
            session.free()
        if watched:
            self._forget(peer.pidfd)

    def _forget(self, pidfd: int) -> None:
        self._watched.discard(pidfd)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)

    async def slab_for(self, layout: wire.WireLayout) -> Slab:
        """Raises as `Backend.slab_for`."""
        return await self.backend.slab_for(layout)

    def session_of(self, connection: Connection, slab: Slab) -> Session:
        max_blocks = max(1, int(slab.dram.num_slots * self._client_share))
        return Session(self.backend, slab, connection.send, max_blocks=max_blocks)

    def _flush_all(self) -> None:
        for connection in tuple(self._connections):
            connection.flush()

    async def statistics(self, request_id: int) -> wire.Statistics:
        sessions = [c.session for c in self._connections if c.session is not None]
        numbers: dict[str, int | float] = {
            "sidecar.connections": len(self._connections),
            "sidecar.held_blocks": sum(session.held_blocks for session in sessions),
            "sidecar.quarantined_blocks": sum(
                session.held_blocks for session in self._quarantine.values()
            ),
            "sidecar.checksum_mismatches": self.backend.mismatched,
        }
        slab = self.backend.slab
        if slab is not None:
            numbers["sidecar.num_slots"] = slab.dram.num_slots
            numbers["sidecar.num_free"] = slab.dram.num_free
            numbers["sidecar.slab_bytes"] = slab.dram.geometry.nbytes
            numbers["sidecar.slab_huge_bytes"] = slab.huge_bytes
            statistics = slab.cache.statistics()
            numbers |= flatten("cache", statistics)
            for pool in statistics.pools:
                numbers |= flatten(f"cache.{pool.tier}", pool)
        if self.backend.store is not None:
            numbers |= flatten("nvme", self.backend.store.statistics())
        uses = tuple(
            wire.NamespaceUse(use.namespace, use.blocks, use.nbytes)
            for use in await self.backend.namespaces()
        )
        return wire.Statistics(request_id, numbers, uses[: wire.MAX_BLOCKS])
