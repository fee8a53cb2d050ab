"""How a tier is opened, and what it tells about itself. Values only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvtier.tiers.nvme.codecs import CodecPolicy
from kvtier.tiers.nvme.health import Patience, State
from kvtier.tiers.nvme.pace import CodecStatistics
from kvtier.tiers.nvme.puts import EXTENT_BYTES
from kvtier.tiers.nvme.segments import SEGMENT_BYTES
from kvtier.tiers.nvme.writer import GROUP_BYTES

_LOT_GROUPS = 4


@dataclass(frozen=True)
class Geometry:
    """Sizes the writer cuts by, in bytes: a record, a commit's worth of records, a file."""

    extent_bytes: int = EXTENT_BYTES
    group_bytes: int = GROUP_BYTES
    segment_bytes: int = SEGMENT_BYTES


@dataclass(frozen=True)
class Settings:
    """How a tier was opened. `is_budgeted`: the write budget was asked for, and is not 0."""

    capacity_bytes: int
    pin_quota_bytes: int
    write_budget_bytes: int
    is_budgeted: bool
    read_only: bool
    io_threads: int
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    patience: Patience
    geometry: Geometry
    policy: CodecPolicy

    @property
    def lot_bytes(self) -> int:
        """About what is reserved in one call, for as many groups as may be."""
        sizes = self.geometry
        most = min(_LOT_GROUPS * sizes.group_bytes, max(sizes.group_bytes, sizes.segment_bytes))
        return min(most, max(self.capacity_bytes // 4, 1))

    @property
    def group_bytes(self) -> int:
        """About what one commit covers."""
        return min(self.geometry.group_bytes, self.lot_bytes)


@dataclass(frozen=True)
class NvmeStatistics:
    """What the store holds, and what happened since it was opened.

    `hits` and `misses` count blocks asked of `fetch`; `quarantined` blocks were forgotten because
    they or an ancestor failed verification, `expired_blocks` because their time had come or an
    operator said so; `pins_lost` were lifted with their blocks. `refused_blocks` of puts were not
    published, of them `budget_refused_blocks` of background puts because the day's budget is spent.
    `written_today_bytes` (UTC) count every put, also from before the last opening.

    `state`: "ok"; "full" or "failing": no puts until one has worked again; "failing" without reads,
    "hung", "rebuilding": every request is answered at once with nothing. `errors` by kind
    (`kvtier.tiers.nvme.health.Fault`); `trips`: how often the tier left the drive alone;
    `stalled_reads`: fetches whose read did not return in time.
    """

    blocks: int
    extents: int
    used_bytes: int
    capacity_bytes: int
    pinned_bytes: int
    pin_quota_bytes: int
    read_bytes: int
    written_bytes: int
    hits: int
    misses: int
    quarantined: int
    expired_blocks: int
    evicted_blocks: int
    pins_lost: int
    rebuilds: int
    refused_blocks: int
    budget_refused_blocks: int
    written_today_bytes: int
    write_budget_bytes: int
    errors: Mapping[str, int]
    trips: int
    stalled_reads: int
    direct: bool
    state: State
    codec: CodecStatistics
