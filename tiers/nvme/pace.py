"""How fast the drive reads and this process decodes, and whether compressing pays then.

`Pace` is one fetch's; `Meter` is the tier's and belongs to its loop. Pure: times are handed in.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.tiers.nvme.record import padded

_WEIGHT = 0.2
"""Of a new measurement against all before it."""

_ENOUGH_BYTES = 4 << 20
"""A fetch shorter than this does not keep the drive busy, and says little about it."""

_MARGIN = 0.95
"""Compressed loading must be estimated at no more than this part of raw loading's time."""

_NAMESPACES = 256

Timed = tuple[float, float, int]
"""Begin and end in seconds of one clock, and the bytes that were moved."""


def pays(*, ratio: float, drive_bytes_s: float, decode_bytes_s: float) -> bool:
    """Whether blocks load faster compressed to `1 / ratio`, read and decoded side by side."""
    raw = 1 / drive_bytes_s
    return max(raw / ratio, 1 / decode_bytes_s) < _MARGIN * raw


def throughput(done: Sequence[Timed]) -> float | None:
    """Bytes a second of the time in which at least one was under way; None if that says little."""
    busy, until = 0.0, float("-inf")
    for begin, end, _ in sorted(done):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    nbytes = sum(each for _, _, each in done)
    return nbytes / busy if nbytes >= _ENOUGH_BYTES and busy > 0 else None


@dataclass(frozen=True)
class Sample:
    """How far one block compresses (in pages; 1: not at all), and how fast one thread decodes it
    (0: there was nothing to decode)."""

    ratio: float
    decode_bytes_s: float


class Pace:
    """What one fetch read and decoded, and when. Any thread adds; read it once all have ended."""

    def __init__(self) -> None:
        self.reads: list[Timed] = []
        self.decodes: list[Timed] = []

    def read(self, begin: float, end: float, nbytes: int) -> None:
        self.reads.append((begin, end, nbytes))

    def decoded(self, begin: float, end: float, nbytes: int) -> None:
        self.decodes.append((begin, end, nbytes))


@dataclass(frozen=True)
class CodecStatistics:
    """Blocks published since the tier was opened, by codec, and their bytes before and after
    encoding (padding not counted); the rates `auto` decides by, 0 where none is known yet."""

    raw_blocks: int
    zstd_blocks: int
    decoded_bytes: int
    stored_bytes: int
    drive_bytes_s: float
    decode_bytes_s: float


class Meter:
    """Running measures of the drive, of decoding, and of how far each namespace compresses.

    `threads`: how many may decode at a time, by which a single block's speed is multiplied until
    real fetches have been measured.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._drive: float | None = None
        self._decode: float | None = None
        self._sampled: float | None = None
        self._ratios: OrderedDict[bytes, float] = OrderedDict()
        self._raw_blocks = 0
        self._zstd_blocks = 0
        self._decoded_bytes = 0
        self._stored_bytes = 0

    def learn(self, pace: Pace) -> None:
        """A fetch has ended. The drive is judged by those that decode nothing: a thread that
        decodes does not keep it busy."""
        if pace.decodes:
            self._decode = _blend(self._decode, throughput(pace.decodes))
        else:
            self._drive = _blend(self._drive, throughput(pace.reads))

    def sampled(self, namespace: bytes, sample: Sample) -> None:
        """A block of a namespace was encoded and decoded by one thread, for trial."""
        if sample.decode_bytes_s:
            self._sampled = _blend(self._sampled, sample.decode_bytes_s)
        self._compressed(namespace, sample.ratio)

    def encoded(self, namespace: bytes, sizes: Sequence[int], block_bytes: int) -> None:
        """Blocks of a namespace are stored in that many bytes each."""
        ratio = len(sizes) * padded(block_bytes) / sum(map(padded, sizes))
        self._compressed(namespace, ratio)

    def _compressed(self, namespace: bytes, ratio: float) -> None:
        self._ratios[namespace] = _blend(self._ratios.get(namespace), ratio) or ratio
        self._ratios.move_to_end(namespace)
        if len(self._ratios) > _NAMESPACES:
            self._ratios.popitem(last=False)

    def knows(self, namespace: bytes) -> bool:
        """Whether it has been seen how far this namespace's blocks compress."""
        return namespace in self._ratios

    def pays(self, namespace: bytes) -> bool:
        """Whether zstd is estimated to load faster. Never before everything is known."""
        ratio, drive, decode = self._ratios.get(namespace), self._drive, self._decode_bytes_s
        if ratio is None or drive is None or decode is None:
            return False
        return pays(ratio=ratio, drive_bytes_s=drive, decode_bytes_s=decode)

    def published(self, sizes: Sequence[int], block_bytes: int) -> None:
        """Blocks of `block_bytes` stand in the store, each in that many stored bytes."""
        raw = sum(size == block_bytes for size in sizes)
        self._raw_blocks += raw
        self._zstd_blocks += len(sizes) - raw
        self._decoded_bytes += block_bytes * len(sizes)
        self._stored_bytes += sum(sizes)

    def statistics(self) -> CodecStatistics:
        """A snapshot."""
        return CodecStatistics(
            raw_blocks=self._raw_blocks,
            zstd_blocks=self._zstd_blocks,
            decoded_bytes=self._decoded_bytes,
            stored_bytes=self._stored_bytes,
            drive_bytes_s=self._drive or 0.0,
            decode_bytes_s=self._decode_bytes_s or 0.0,
        )

    @property
    def _decode_bytes_s(self) -> float | None:
        if self._decode is not None or self._sampled is None:
            return self._decode
        return self._sampled * self._threads


def _blend(known: float | None, new: float | None) -> float | None:
    if known is None or new is None:
        return new if known is None else known
    return known + _WEIGHT * (new - known)
