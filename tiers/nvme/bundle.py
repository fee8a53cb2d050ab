"""The ends of a bundle, to bytes and back: its first page and its footer. Pure: no file, no store.

`BUNDLE.md` beside this file is the grammar; its worked example is a test. What stands between the
ends are records as `record.py` makes them.
"""

from dataclasses import dataclass
from pathlib import Path
from struct import Struct

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from kvtier.index.words import block_keys
from kvtier.tiers.errors import BundleRefused, RecordRefused, StoreVersion
from kvtier.tiers.nvme.record import FORMAT_VERSION, PAGE, RecordHeader, padded

BUNDLE_VERSION = 1
MAX_HEADER_BYTES = 1 << 20
MAX_BLOCK_BYTES = 256 << 20
MAX_FOOTER_BYTES = 4 << 20

_HEAD_MAGIC = b"KVBUNDLE"
_HEAD = Struct("<8sIIQ")
_HEAD_CHECKSUM = slice(16, 24)

_FOOTER_MAGIC = b"KVFOOTER"
_END_MARK = b"KVBNDEND"
_FOOTER = Struct("<8sIIQQQ")
_FOOTER_CHECKSUM = slice(32, 40)
_NAMESPACE = Struct("<32sQQ")
_END = Struct("<Q8s")

_CHECKSUM_OF_HEADER = slice(112, 120)


@dataclass(frozen=True)
class NamespaceTotals:
    """What a bundle holds of one namespace; `nbytes` are decoded bytes."""

    digest: bytes
    blocks: int
    nbytes: int


@dataclass(frozen=True)
class Footer:
    """What a complete bundle says about itself. `digest` covers every record's header checksum."""

    records: int
    digest: int
    namespaces: tuple[NamespaceTotals, ...]


class Contents:
    """Adds up records as they pass, to the footer they need."""

    def __init__(self) -> None:
        self.records = 0
        self._digest = xxh3_64()
        self._namespaces: dict[bytes, NamespaceTotals] = {}

    def add(self, header: RecordHeader, raw: bytes) -> None:
        """Count a record; `raw` is its header as it stands in the file."""
        self.records += 1
        self._digest.update(raw[_CHECKSUM_OF_HEADER])
        name, count = header.namespace, len(header.blocks)
        old = self._namespaces.get(name, NamespaceTotals(name, 0, 0))
        nbytes = old.nbytes + count * header.block_bytes
        self._namespaces[name] = NamespaceTotals(name, old.blocks + count, nbytes)

    def footer(self) -> Footer:
        rows = tuple(row for _, row in sorted(self._namespaces.items()))
        return Footer(self.records, self._digest.intdigest(), rows)


def encode_head() -> bytes:
    """The first page of a bundle."""
    page = bytearray(_HEAD.pack(_HEAD_MAGIC, BUNDLE_VERSION, FORMAT_VERSION, 0).ljust(PAGE, b"\0"))
    page[_HEAD_CHECKSUM] = xxh3_64_intdigest(page).to_bytes(8, "little")
    return bytes(page)


def check_head(raw: bytes, path: Path) -> None:
    """Raises `BundleRefused` if a file that begins with `raw` is no bundle, `StoreVersion` if it
    is one of another format version."""
    if len(raw) < PAGE or raw[:8] != _HEAD_MAGIC:
        raise BundleRefused(f"{path}: is no bundle; make one with `kvtier export`")
    _, version, records, checksum = _HEAD.unpack_from(raw)
    if (version, records) != (BUNDLE_VERSION, FORMAT_VERSION):
        raise StoreVersion(
            f"{path}: bundle format {version} with records of format {records}, this kvtier reads "
            f"{BUNDLE_VERSION} with {FORMAT_VERSION}; export again with the same kvtier"
        )
    blank = bytearray(raw)
    blank[_HEAD_CHECKSUM] = bytes(8)
    if xxh3_64_intdigest(blank) != checksum:
        raise BundleRefused(f"{path}: its first page is damaged; copy or export it again")


def encode_footer(footer: Footer, page: int) -> bytes:
    """The footer's bytes, to stand at `page` as the last thing in the file.

    Raises `BundleRefused` for more namespaces than a footer may hold.
    """
    rows = b"".join(_NAMESPACE.pack(n.digest, n.blocks, n.nbytes) for n in footer.namespaces)
    nbytes = padded(_FOOTER.size + len(rows) + _END.size)
    if nbytes > MAX_FOOTER_BYTES:
        raise BundleRefused("bundle: too many namespaces for one file; export them in parts")
    fixed = _FOOTER.pack(
        _FOOTER_MAGIC, nbytes, len(footer.namespaces), footer.records, footer.digest, 0
    )
    body = bytearray((fixed + rows).ljust(nbytes, b"\0"))
    body[-_END.size :] = _END.pack(page, _END_MARK)
    body[_FOOTER_CHECKSUM] = xxh3_64_intdigest(body).to_bytes(8, "little")
    return bytes(body)


def decode_footer(raw: bytes, page: int) -> Footer | None:
    """The footer that `raw` is, whole, at `page`; None if it is none or damaged."""
    if (
        len(raw) < PAGE
        or raw[:8] != _FOOTER_MAGIC
        or raw[-_END.size :] != _END.pack(page, _END_MARK)
    ):
        return None
    _, nbytes, count, records, digest, checksum = _FOOTER.unpack_from(raw)
    blank = bytearray(raw)
    blank[_FOOTER_CHECKSUM] = bytes(8)
    end = _FOOTER.size + count * _NAMESPACE.size
    if nbytes != len(raw) or end > nbytes - _END.size or xxh3_64_intdigest(blank) != checksum:
        return None
    rows = tuple(NamespaceTotals(*row) for row in _NAMESPACE.iter_unpack(raw[_FOOTER.size : end]))
    return Footer(records, digest, rows)


def check_names(header: RecordHeader) -> None:
    """Raises `RecordRefused` unless every block's key is the hash of what the header says."""
    tokens = np.frombuffer(header.tokens, "<i4").astype(np.int32, copy=False)
    size = header.block_tokens
    keys = block_keys(header.namespace, header.parent, tokens, size) if size else []
    if keys != [block.key for block in header.blocks]:
        raise RecordRefused("record: its keys are not those of its tokens")
