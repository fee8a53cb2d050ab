"""Stores blocks as a bundle should have them: as they are, or over byte planes. Knows no file.

A store does not say what its blocks' numbers are, so the number of planes is found by trying: on
the first block of some records of a namespace, and from then on what was shortest.
"""

from collections import Counter
from dataclasses import replace

import numpy as np

from kvtier.tiers.contracts import Bytes
from kvtier.tiers.errors import CodecUnknown
from kvtier.tiers.nvme.codecs import Coder
from kvtier.tiers.nvme.record import PLANES, RAW, StoredBlock

BUNDLE_CODECS = ("zstd", "raw")
_SAMPLES = 8


class Packer:
    """One export's choice of codec. Raises `CodecUnknown` for a name not in `BUNDLE_CODECS`."""

    def __init__(self, codec: str, coder: Coder) -> None:
        if codec not in BUNDLE_CODECS:
            raise CodecUnknown(
                f"codec: {codec!r} is unknown; use one of {', '.join(BUNDLE_CODECS)}"
            )
        self.raw = codec == "raw"
        self._coder = coder
        self._samples: Counter[bytes] = Counter()
        self._sizes: dict[bytes, list[int]] = {}

    def pack(
        self, namespace: bytes, row: StoredBlock, stored: Bytes, block: Bytes, *, first: bool
    ) -> tuple[StoredBlock, Bytes]:
        """The row and the stored bytes of a block in the bundle.

        `row`, `stored`: as it stands in the store; `block`: decoded, valid until the coder is used
        again. What is encoded there stays so, unless the bundle is to be raw.
        """
        if self.raw:
            kept = stored if row.codec == RAW else block.copy()
            return replace(row, codec=RAW, stored_bytes=block.nbytes), kept
        if row.codec != RAW:
            return row, stored
        if first and self._samples[namespace] < _SAMPLES:
            self._sample(namespace, block)
        planes = self._planes(namespace)
        encoded = self._coder.encode(block, planes)
        if encoded is None:
            return row, stored
        return (
            replace(row, codec=planes, stored_bytes=len(encoded)),
            np.frombuffer(encoded, np.uint8),
        )

    def _sample(self, namespace: bytes, block: Bytes) -> None:
        self._samples[namespace] += 1
        sizes = self._sizes.setdefault(namespace, [0] * len(PLANES))
        for i, planes in enumerate(PLANES):
            encoded = self._coder.encode(block, planes)
            sizes[i] += block.nbytes if encoded is None else len(encoded)

    def _planes(self, namespace: bytes) -> int:
        sizes = self._sizes.get(namespace, [0])
        return PLANES[sizes.index(min(sizes))]
