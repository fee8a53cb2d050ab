"""The LMDB catalogue: where each block's record stands. Knows no segment file and no bytes of KV.

LMDB's rules bind the caller: `commit` is called from one thread only; reads may come from any. An
environment never crosses a fork. Each read is one short transaction, and returns plain values.
"""

import errno
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from struct import Struct
from typing import Any

import lmdb

from kvtier.index.errors import KvtierError
from kvtier.index.words import KEY_BYTES, BlockKey
from kvtier.tiers.errors import StoreCorrupt, StoreInUse, StoreUnsupported, StoreVersion
from kvtier.tiers.nvme.edits import CONDEMNED, Edit
from kvtier.tiers.nvme.orders import DeleteNamespace, Order, UnpinLabel, obey
from kvtier.tiers.nvme.pages import audit_pages
from kvtier.tiers.nvme.pins import PinName, path_bytes
from kvtier.tiers.nvme.record import FORMAT_VERSION
from kvtier.tiers.nvme.rows import (
    CURE,
    Counters,
    DayWritten,
    Extent,
    Freed,
    NamespaceRow,
    PinRow,
    SegmentRow,
    Table,
    decode_day_written,
    decode_namespace,
    decode_pin,
    decode_segment,
    key_due,
    key_namespace,
    key_number,
    key_pair,
    key_pin,
    namespace_key,
)
from kvtier.tiers.nvme.tables import Rows, Span

MAP_BYTES = 64 << 30
"""Address space, not disk: the file grows as rows come. LMDB cannot grow the map while in use."""

_FORMAT_KEY = b"format"
_EPOCH_KEY = b"epoch"
_BUDGET_KEY = b"budget"
_WORD = Struct("<Q")


@dataclass(frozen=True)
class Addition:
    """An extent to publish, and its last use. The catalogue fills in `extent.namespace_id`."""

    namespace: bytes
    extent: Extent
    used: int


SWEEP_SHARE = 64
"""Steps of what is due (an extent or a pin each) that any transaction does beside its own."""

SWEEP_STEPS = 1024
"""Steps that a transaction does which is there for them: others get their turn in between."""


@dataclass(frozen=True)
class Change:
    """What one transaction does at time `now`, in this order of fields.

    `supersede`: the blocks of an addition take the place of the same blocks in older records.
    """

    now: int = 0
    cleared: Sequence[Freed] = ()
    abandoned: Sequence[Freed] = ()
    uses: Mapping[int, int] = field(default_factory=dict)
    quarantine: Sequence[tuple[int, int]] = ()
    orders: Sequence[Order] = ()
    sweep: int = SWEEP_SHARE
    supersede: bool = False
    additions: Sequence[Addition] = ()
    ends: Mapping[int, int] = field(default_factory=dict)
    sealed: Collection[int] = ()
    evict_bytes: int = 0
    protected: Collection[int] = ()
    lift_pins: bool = False
    """Evict what is pinned too if nothing else is left; `protected` does not count then."""
    written: DayWritten | None = None


@dataclass(frozen=True)
class Outcome:
    """What a transaction did: which additions it took, the answers to its orders, what is to be
    punched now, how many blocks left and why, new totals, and when something is due next."""

    accepted: tuple[bool, ...]
    answers: tuple[int | KvtierError, ...]
    freed: tuple[Freed, ...]
    num_evicted: int
    num_quarantined: int
    num_expired: int
    num_pins_lost: int
    next_due: int | None
    totals: Counters


class Catalogue:
    """An open catalogue. Reads and `commit` raise `OSError` if LMDB fails (ENOSPC: it is full),
    `StoreCorrupt` at a damaged row."""

    def __init__(self, environment: Any, tables: list[Any], path: Path) -> None:
        self._environment = environment
        self._tables = tables
        self._path = path
        self._namespaces: dict[bytes, int] = {}
        self._listener: Callable[[StoreCorrupt], None] | None = None

    @classmethod
    def open(cls, path: Path, *, read_only: bool, create: bool = False) -> "Catalogue":
        """Open the catalogue in directory `path`; with `create`, an empty one if there is none.

        LMDB is let near the file only after `audit_pages`. Raises `StoreVersion` for another
        format, `StoreCorrupt` if it is damaged, missing or no catalogue, `StoreInUse` if this
        process has it open, `StoreUnsupported` if the system refuses.
        """
        if not create or (path / "data.mdb").exists():
            _audit(path)
        try:
            environment = lmdb.open(
                str(path),
                map_size=MAP_BYTES,
                max_dbs=len(Table),
                max_readers=64,
                meminit=False,
                readahead=False,
                readonly=read_only,
                lock=not read_only,
                create=create,
                mode=0o600,
            )
        except lmdb.Error as error:
            raise _unopened(path, error) from error
        try:
            catalogue = cls(environment, [], path)
            for table in Table:
                name, dupsort = _name(table), table is Table.HEADS
                catalogue._tables.append(environment.open_db(name, dupsort=dupsort, create=create))
                if table is Table.META:  # first: another version may lack the others
                    catalogue._check_version(create)
            catalogue._namespaces = {
                row.digest: id for id, row in catalogue.namespace_rows() if not row.leaving
            }
        except lmdb.Error as error:
            environment.close()
            raise _unopened(path, error) from error
        except BaseException:
            environment.close()
            raise
        return catalogue

    def on_damage(self, listener: Callable[[StoreCorrupt], None]) -> None:
        """Also tell `listener` of damage that is found on touch, from the thread that finds it."""
        self._listener = listener

    def close(self) -> None:
        self._environment.close()

    def count(self, namespace: bytes, keys: Sequence[BlockKey], now: int) -> int:
        """How many leading `keys` of one branch are served at `now` (microseconds)."""
        return sum(span.count for span in self.find(namespace, keys, now))

    def find(self, namespace: bytes, keys: Sequence[BlockKey], now: int) -> list[Span]:
        """Where the leading `keys` of one branch stand that are served at `now` (microseconds).

        Stops at the first block that is not there, that has expired or hangs off one that has.
        Where the tables disagree it stops too; `check` reports that.
        """
        number = self._namespaces.get(namespace)
        if number is None:
            return []
        with self.reading() as rows:
            return list(rows.spans(number, b"".join(keys), now))

    def walk(self, namespace: bytes, keys: Sequence[BlockKey], now: int) -> Iterator[Span]:
        """As `find`, extent by extent: each is looked up when it is asked for.

        A transaction each, so that a slow caller keeps no old pages; a block may leave between
        two of them, as it may after any lookup.
        """
        number = self._namespaces.get(namespace)
        wanted, at = b"".join(keys), 0
        while number is not None and at < len(wanted):
            with self.reading() as rows:
                span = rows.span(number, wanted, at, now)
            if span is None:
                return
            yield span
            at += span.count * KEY_BYTES

    def counters(self) -> Counters:
        with self.reading() as rows:
            return rows.counters()

    def written(self) -> DayWritten | None:
        """What had been written on the last day that anything was; None if nothing ever was."""
        with self.reading() as rows:
            body = rows.get(Table.META, _BUDGET_KEY)
        return None if body is None else decode_day_written(body)

    def namespace_rows(self) -> list[tuple[int, NamespaceRow]]:
        """`(number, row)` of every namespace."""
        with self.reading() as rows:
            table = rows.scan(Table.NAMESPACES)
        return [(key_namespace(key), decode_namespace(body)) for key, body in table]

    def segments(self) -> dict[int, SegmentRow]:
        with self.reading() as rows:
            table = rows.scan(Table.SEGMENTS)
        return {key_number(key): decode_segment(body) for key, body in table}

    def frees(self) -> list[Freed]:
        """Ranges that were freed and perhaps not yet punched."""
        with self.reading() as rows:
            table = rows.scan(Table.FREES)
        return [Freed(0, *key_pair(key), key_number(body)) for key, body in table]

    def next_due(self) -> int | None:
        """When something expires next (microseconds), or None."""
        with self.reading() as rows:
            due = rows.first(Table.DUE)
        return None if due is None else key_due(due[0])[0]

    def pins(self) -> list[tuple[bytes, PinName, PinRow, int]]:
        """`(namespace digest, name, row, bytes of its path)` of every pin."""
        found = []
        with self.reading() as rows:
            for key, body in rows.scan(Table.PINS):
                name = PinName(*key_pin(key))
                namespace = rows.get(Table.NAMESPACES, namespace_key(name.namespace_id))
                if namespace is None:
                    raise StoreCorrupt(
                        f"catalogue: pin {name.label!r} is of namespace {name.namespace_id}, which "
                        f"has no row; {CURE}"
                    )
                digest = decode_namespace(namespace).digest
                found.append((digest, name, decode_pin(body), path_bytes(rows, name)))
        return found

    def begin_epoch(self, after: int = 0) -> int:
        """Count this opening and forget namespaces that hold nothing; returns the epoch (from 1).

        It is later than `after`. Ids are `epoch << 32 | n`, so no id is ever used twice, not even
        after a crash.
        """
        with self._writing() as edit:
            epoch = max(_word(edit.get(Table.META, _EPOCH_KEY)), after) + 1
            edit.put(Table.META, _EPOCH_KEY, _WORD.pack(epoch))
            for digest, number in list(self._namespaces.items()):
                body = edit.get(Table.NAMESPACES, namespace_key(number))
                if body is None or not decode_namespace(body).blocks:
                    edit.drop(Table.NAMESPACES, namespace_key(number))
                    del self._namespaces[digest]
            edit.finish()
        return epoch

    def commit(self, change: Change) -> Outcome:
        """Apply `change` in one durable transaction, or raise and change nothing."""
        with self._writing() as edit:
            for freed in change.cleared:
                edit.clear(freed)
            for freed in change.abandoned:
                edit.queue(freed)
            edit.touch(change.uses)
            for id, position in change.quarantine:
                edit.expire(id, position, CONDEMNED)
            answers = tuple(self._obey(edit, order, change.now) for order in change.orders)
            edit.sweep(change.now, change.sweep)
            numbers: dict[bytes, int] = {}
            accepted = tuple(
                self._add(edit, added, numbers, change.supersede) for added in change.additions
            )
            for id, end in change.ends.items():
                edit.segment(id).end = max(edit.segment(id).end, end)
            for id in change.sealed:
                edit.segment(id).sealed = True
            if change.evict_bytes > 0 and change.lift_pins:
                edit.lift_and_evict(change.evict_bytes)
            elif change.evict_bytes > 0:
                edit.evict(change.evict_bytes, change.protected)
            if change.written is not None:
                edit.put(Table.META, _BUDGET_KEY, change.written.encode())
            edit.finish()
            next_due = edit.next_due
        self._deleted(change.orders)
        self._namespaces.update(numbers)
        return Outcome(
            accepted=accepted,
            answers=answers,
            freed=tuple(edit.freed),
            num_evicted=edit.num_removed - edit.num_quarantined - edit.num_expired,
            num_quarantined=edit.num_quarantined,
            num_expired=edit.num_expired,
            num_pins_lost=edit.num_pins_lost,
            next_due=next_due,
            totals=edit.totals,
        )

    def _obey(self, edit: Edit, order: Order, now: int) -> int | KvtierError:
        number = None if isinstance(order, UnpinLabel) else self._namespaces.get(order.namespace)
        return obey(edit, order, number, now)

    def _add(
        self, edit: Edit, addition: Addition, numbers: dict[bytes, int], supersede: bool
    ) -> bool:
        """Publish one extent, or queue its place as freed. `numbers`: new or known namespaces."""
        digest, extent = addition.namespace, addition.extent
        number = numbers.get(digest) or self._namespaces.get(digest)
        if number is None or edit.namespace(number).leaving:
            number = edit.new_namespace(digest)
        numbers[digest] = number
        extent = replace(extent, namespace_id=number)
        if supersede:
            edit.supersede(extent)
        accepted = edit.add(extent, addition.used)
        if not accepted:
            edit.queue(Freed(extent.id, extent.segment, extent.offset, extent.nbytes))
        return accepted

    def _deleted(self, orders: Sequence[Order]) -> None:
        for order in orders:
            if isinstance(order, DeleteNamespace):
                self._namespaces.pop(order.namespace, None)

    def _check_version(self, create: bool) -> None:
        with self.reading() as rows:
            body = rows.get(Table.META, _FORMAT_KEY)
        if body is not None and _word(body) != FORMAT_VERSION:
            raise StoreVersion(
                f"{self._path.parent}: store format {_word(body)}, this kvtier reads format "
                f"{FORMAT_VERSION}; use the kvtier that wrote it, or a new directory"
            )
        if body is None and not create:
            raise _uncatalogued(self._path)
        if body is None:
            with self._writing() as edit:
                edit.put(Table.META, _FORMAT_KEY, _WORD.pack(FORMAT_VERSION))

    @contextmanager
    def reading(self) -> Iterator[Rows]:
        """One read transaction over everything. Keep it short beside a writer."""
        with self._telling(), _lmdb_as_oserror(), self._environment.begin() as txn:
            yield Rows(txn, self._tables)

    @contextmanager
    def _writing(self) -> Iterator[Edit]:
        with self._telling(), _lmdb_as_oserror(), self._environment.begin(write=True) as txn:
            yield Edit(txn, self._tables)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except StoreCorrupt as error:
            if self._listener is not None:
                self._listener(error)
            raise


def _name(table: Table) -> bytes:
    """The name of a table's LMDB database."""
    return table.name.lower().encode()


def _word(body: bytes | None) -> int:
    return 0 if body is None else int(_WORD.unpack(body)[0])


_DAMAGED = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.VersionMismatchError,
    lmdb.PageNotFoundError,
    lmdb.IncompatibleError,
)


def _audit(path: Path) -> None:
    data = path / "data.mdb"
    if not data.exists():
        raise _uncatalogued(path)
    names = {_name(table): table is Table.HEADS for table in Table}
    try:
        audit_pages(data, names, map_bytes=MAP_BYTES)
    except StoreCorrupt as error:
        raise StoreCorrupt(f"{path.parent}: its catalogue is damaged ({error}); {CURE}") from error
    except OSError as error:
        raise StoreUnsupported(f"{data}: cannot be opened ({error.strerror}); mend that") from error


def _uncatalogued(path: Path) -> StoreCorrupt:
    return StoreCorrupt(f"{path.parent}: has lost its catalogue; {CURE}")


def _unopened(path: Path, error: Any) -> Exception:
    code = int(getattr(error, "code", 0) or 0)
    if code == errno.ENOENT or isinstance(error, lmdb.NotFoundError):
        return _uncatalogued(path)
    if isinstance(error, _DAMAGED):
        return StoreCorrupt(f"{path.parent}: its catalogue is damaged ({error}); {CURE}")
    if code == errno.ENOMEM:
        return StoreUnsupported(
            f"{path}: cannot map {MAP_BYTES >> 30} GiB of address space; raise `ulimit -v`"
        )
    if code in (errno.ENOSPC, errno.EDQUOT):
        return StoreUnsupported(f"{path}: the disk is full; free some space or choose another")
    if code == 0:  # the one refusal that LMDB's Python side makes by itself
        return StoreInUse(f"{path}: open already in this process; share that tier")
    return StoreUnsupported(f"{path}: the catalogue cannot be opened ({error}); mend the disk")


@contextmanager
def _lmdb_as_oserror() -> Iterator[None]:
    try:
        yield
    except _DAMAGED as error:
        raise StoreCorrupt(f"catalogue: {error}; {CURE}") from error
    except lmdb.Error as error:
        full = isinstance(error, lmdb.MapFullError) or getattr(error, "code", 0) == errno.ENOSPC
        raise OSError(errno.ENOSPC if full else errno.EIO, f"catalogue: {error}") from error
