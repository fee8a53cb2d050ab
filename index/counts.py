"""What the index says of itself at one moment. Plain values."""

from dataclasses import dataclass

from kvtier.index.words import TierId


@dataclass(frozen=True)
class ColumnStatistics:
    """Blocks of one column by state; `pinned` counts blocks with a pin, whatever their state."""

    tier: TierId
    resident: int
    filling: int
    leaving: int
    pinned: int


@dataclass(frozen=True)
class IndexStatistics:
    """Sizes at one moment. `hint_only`: blocks known by stores' hints alone."""

    blocks: int
    nodes: int
    leaves: int
    columns: tuple[ColumnStatistics, ...]
    hint_only: int
