"""Who owns a store directory: one writer, or any number of readers. Knows nothing of its content.

The lock is `flock` on the file `owner`, so the kernel drops it when the owner dies. The file holds
the writer's PID as text, only to name it to those who are refused.
"""

import fcntl
import os
from pathlib import Path

from kvtier.tiers.errors import StoreInUse, StoreUnsupported


class StoreLock:
    """Holds the directory until `release`. Raises `StoreInUse`, naming the owner's PID."""

    def __init__(self, directory: Path, *, read_only: bool) -> None:
        self._writer = not read_only
        path = directory / "owner"
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
        try:
            self._fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreUnsupported(
                f"{directory}: cannot be locked ({error.strerror}); mend that or choose another"
            ) from error
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_SH if read_only else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _alive(os.pread(self._fd, 32, 0))
            os.close(self._fd)
            raise StoreInUse(
                f"{directory}: store in use by {owner}; run `kvtier serve` to share it"
            ) from None
        if self._writer:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let go. Idempotent."""
        if self._fd < 0:
            return
        if self._writer:
            os.ftruncate(self._fd, 0)
        os.close(self._fd)
        self._fd = -1


def _alive(text: bytes) -> str:
    """`PID n` if that process lives; a reader leaves no PID and a dead writer's may linger."""
    if not text.strip().isdigit():
        return "another process"
    pid = int(text)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "another process"
    except PermissionError:
        pass
    return f"PID {pid}"
