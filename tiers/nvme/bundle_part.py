"""`NAME.part`: a bundle while it is written. Knows no store.

Resumable: what an earlier, killed export left is verified and kept while it is what this one would
write again. Any failure leaves `NAME` as it was and `NAME.part` with all that was written.
"""

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np

from kvtier.index.words import BlockKey
from kvtier.tiers.contracts import Bytes
from kvtier.tiers.errors import BundleRefused, StoreVersion
from kvtier.tiers.nvme.bundle import Contents, encode_footer, encode_head
from kvtier.tiers.nvme.bundle_reader import Bundle, Damage, Problems, Record, num_sound
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.record import PAGE, RAW, RecordHeader, encode_header
from kvtier.tiers.nvme.workers import Scratch


class Part:
    """`NAME.part` while it grows to be the bundle `NAME`.

    Raises `BundleRefused` at any failure to write; the file keeps what was written before.
    """

    def __init__(self, destination: Path, force: bool, files: Files | None) -> None:
        self._destination = destination
        self._force = force
        self._files = files or Files(direct=False)
        self._path = destination.with_name(destination.name + ".part")
        self._scratch = Scratch()
        self._old: Bundle | None = None
        self._left: Iterator[Record] = iter(())
        self._next: Record | None = None
        self.contents = Contents()
        self.end = PAGE
        self.resumed = 0

    def __enter__(self) -> "Part":
        self._refuse_to_replace()
        try:
            self._fd = self._files.open(self._path, create=True)
        except OSError as error:
            raise self._failed(error) from error
        try:
            self._own()
            self._look_at_what_is_left()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._old is not None:
            self._old.close()
        self._files.close(self._fd)

    def resume(
        self, namespace: bytes, parent: BlockKey, keys: tuple[BlockKey, ...], *, raw: bool
    ) -> RecordHeader | None:
        """The header of the next record that an earlier export left, if it holds just these blocks
        (and all of them `raw`, if that is asked for)."""
        record = self._next
        if record is None:
            return None
        header = record.header
        told = (header.namespace, header.parent, tuple(block.key for block in header.blocks))
        encoded = any(block.codec != RAW for block in header.blocks)
        if told != (namespace, parent, keys) or (raw and encoded):
            return None
        self.contents.add(header, record.raw)
        self.end += header.record_bytes
        self.resumed += 1
        self._next = next(self._left, None)
        return header

    def append(self, header: RecordHeader, stored: Sequence[Bytes]) -> None:
        """Write a record behind what is there. Of `header`, place and generation are ours."""
        self._next = None
        placed = replace(
            header, generation=self.contents.records + 1, segment=0, page=self.end // PAGE
        )
        head = encode_header(placed)
        record = self._scratch.take("record", placed.record_bytes)
        record[:] = 0
        record[: len(head)] = np.frombuffer(head, np.uint8)
        for data, offset in zip(stored, placed.offsets, strict=True):
            record[offset : offset + len(data)] = data
        self._write(record)
        self.contents.add(placed, head)

    def finish(self) -> None:
        """Close the bundle with its footer and give it its name, durably."""
        self._next = None
        footer = encode_footer(self.contents.footer(), self.end // PAGE)
        self._write(np.frombuffer(footer, np.uint8))
        try:
            self._files.fdatasync(self._fd)
            os.replace(self._path, self._destination)
            self._files.sync_directory(self._destination.parent)
        except OSError as error:
            raise self._failed(error) from error

    def discard(self) -> None:
        """Give up a bundle that got no record; what an earlier export left of one stays."""
        if self._next is not None:
            return
        try:
            self._files.unlink(self._path)
        except OSError as error:
            raise self._failed(error) from error

    def _refuse_to_replace(self) -> None:
        if self._destination.exists() and not self._force:
            raise BundleRefused(
                f"{self._destination}: is there already; choose another name or give --force"
            )

    def _own(self) -> None:
        """Be the only export that writes this file."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.fstat(self._fd), self._path.stat())
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:
            raise BundleRefused(f"{self._path}: another export writes it; wait for its end")
        self._refuse_to_replace()

    def _look_at_what_is_left(self) -> None:
        try:
            self._old = Bundle(self._path)
        except (BundleRefused, StoreVersion):
            self.end = 0
            self._write(np.frombuffer(encode_head(), np.uint8))
            return
        self._left = _sound_records(self._old)
        self._next = next(self._left, None)

    def _write(self, data: Bytes) -> None:
        """Put `data` at the end, and nothing behind it."""
        done = 0
        try:
            self._files.truncate(self._path, self.end)
            while done < len(data):
                count = self._files.pwritev(self._fd, [data[done:]], self.end + done)
                if not count:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                done += count
        except OSError as error:
            raise self._failed(error) from error
        self.end += len(data)

    def _failed(self, error: OSError) -> BundleRefused:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        cure = "free some space" if full else "mend that or choose another place"
        return BundleRefused(
            f"{self._path}: cannot be written ({error.strerror}); {cure}, then export again: "
            "it goes on behind what is there"
        )


def _sound_records(bundle: Bundle) -> Iterator[Record]:
    """The records of a bundle up to the first damage of any kind."""
    for item in bundle.records():
        if isinstance(item, Damage) or num_sound(bundle, item, Problems()) < len(
            item.header.blocks
        ):
            return
        yield item
