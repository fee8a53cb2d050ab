"""Who is at the other end: another user is refused, and a process's end shows in its pidfd."""

import os
import select
import signal
import socket
from pathlib import Path

import pytest

from kvtier.tiers.sidecar.peer import Peer, PeerRefused
from tests.sidecar.rig import finish, python


def test_a_peer_of_another_user_is_refused_by_name() -> None:
    one, other = socket.socketpair()
    with one, other, pytest.raises(PeerRefused, match=f"user {os.getuid()} may not use user"):
        Peer.of(one, uid=os.getuid() + 1)


def test_a_peers_pidfd_becomes_readable_when_its_process_ends(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(path))
        listening.listen()
        listening.settimeout(30)
        code = (
            "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM); "
            "s.connect(sys.argv[1]); s.close(); sys.stdin.read()"
        )
        child = python(code, path)
        connection, _ = listening.accept()
    with connection:
        peer = Peer.of(connection, uid=os.getuid())
        try:
            assert (peer.pid, peer.uid) == (child.pid, os.getuid())
            assert not os.get_inheritable(peer.pidfd)
            poller = select.poll()
            poller.register(peer.pidfd, select.POLLIN)
            assert connection.recv(1) == b""
            assert poller.poll(0) == []
            finish(child, signal.SIGKILL)
            ((_, events),) = poller.poll(30_000)
            assert events & select.POLLIN
        finally:
            os.close(peer.pidfd)
