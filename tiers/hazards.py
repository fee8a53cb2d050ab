"""Who used a slot last, and whether the next user is ordered behind: the check behind `SimDevice`.

Work is a graph of operations, each with those that must be over before it runs. Two operations that
touch one slot, one of them writing, need a path between them; what merely happens to be over at
the moment counts as ordered, for its submitter may have seen that. Runs nothing itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.tiers.contracts import Pool

Place = tuple[Pool, int]
"""One slot of one pool."""


class HazardError(Exception):
    """Work that touches a slot without being ordered behind an earlier user of that slot."""


@dataclass(eq=False)
class Operation:
    """One piece of work. `before`: what has to be over first."""

    name: str
    action: Callable[[], None]
    before: tuple["Operation", ...]
    done: bool = False
    error: Exception | None = None

    def is_ordered_after(self, other: "Operation") -> bool:
        """Whether `other` is over, or certain to be over when this runs."""
        if other.done:
            return True
        seen: set[int] = set()
        front = list(self.before)
        while front:
            operation = front.pop()
            if operation is other:
                return True
            if id(operation) not in seen and not operation.done:
                seen.add(id(operation))
                front += operation.before
        return False


@dataclass
class _Users:
    writer: Operation | None = None
    readers: list[Operation] = field(default_factory=list)


class Hazards:
    """The last writer of every place and its readers since."""

    def __init__(self) -> None:
        self._users: dict[Place, _Users] = {}

    def is_busy(self, place: Place) -> bool:
        """Whether an earlier user of this place has not run yet."""
        users = self._users.get(place, _Users())
        writing = users.writer is not None and not users.writer.done
        return writing or any(not reader.done for reader in users.readers)

    def read(self, operation: Operation, place: Place) -> None:
        """Raises `HazardError` unless `operation` is ordered after the last writer."""
        users = self._users.setdefault(place, _Users())
        _check(operation, place, users.writer, "read after write")
        users.readers = [reader for reader in users.readers if not reader.done]
        users.readers.append(operation)

    def write(self, operation: Operation, place: Place) -> None:
        """Raises `HazardError` unless `operation` is ordered after the last writer and readers."""
        users = self._users.get(place, _Users())
        _check(operation, place, users.writer, "write after write")
        for reader in users.readers:
            _check(operation, place, reader, "write after read")
        self._users[place] = _Users(operation)


def _check(operation: Operation, place: Place, earlier: Operation | None, hazard: str) -> None:
    if earlier is None or earlier is operation or operation.is_ordered_after(earlier):
        return
    pool, slot = place
    raise HazardError(
        f"{hazard} on {pool.tier}[{slot}]: {operation.name!r} is not ordered after {earlier.name!r}"
    )
