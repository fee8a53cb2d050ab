"""Every launch's logits, by request: what exact mode promises the bits of."""

from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvtier.engine.runner import Runner
from kvtier.engine.scheduler import Work


class Trails:
    """Logits of every request, in the order in which its tokens were picked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rows: dict[int, list[Tensor]] = defaultdict(list)
        run = Runner.run

        def watched(runner: Runner, work: Sequence[Work]) -> dict[int, Tensor]:
            logits = run(runner, work)
            for number, row in logits.items():
                self._rows[number].append(row.clone())
            return logits

        monkeypatch.setattr(Runner, "run", watched)

    def take(self) -> list[Tensor]:
        """`[tokens, vocab]` of each request since the last call, in the order of their ids."""
        taken = [torch.stack(rows) for _, rows in sorted(self._rows.items())]
        self._rows.clear()
        return taken


def same_bits(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
