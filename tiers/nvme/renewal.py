"""The catalogue is opened again while the tier runs: replaced if it is damaged, and as it is where
nobody knows any more how it and the files stand. Knows when; what is done is in `recovery.py`.

Meanwhile the store is out: a lookup answers nothing, fetches and puts fail at once. What was under
way ends first, so that nobody reads the old catalogue when it is closed. Runs on the tier's loop,
but for what says otherwise.
"""

import asyncio
import logging
from collections.abc import Callable

from kvtier.index.errors import KvtierError
from kvtier.tiers.errors import StoreCorrupt
from kvtier.tiers.nvme.core import Core
from kvtier.tiers.nvme.health import State
from kvtier.tiers.nvme.reader import Reader
from kvtier.tiers.nvme.recovery import Opened
from kvtier.tiers.nvme.writer import Writer

_log = logging.getLogger(__name__)

PAUSE_S = 60.0
"""Between two replacements. Damage that comes back sooner leaves the store out until then."""


class Renewal:
    """Opens the catalogue anew when told that it is `needed`, at most once in `PAUSE_S`.

    `reopen` is told why, runs on the catalogue's thread, closes the old one and returns the new
    one, open.
    """

    def __init__(
        self,
        core: Core,
        reader: Reader,
        writer: Writer,
        reopen: Callable[[Exception], Opened],
        clock: Callable[[], float],
    ) -> None:
        self._core = core
        self._reader = reader
        self._writer = writer
        self._reopen = reopen
        self._clock = clock
        self._not_before: float | None = None
        self._reason: Exception | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_due(self) -> bool:
        """Whether the store is out for this and may be tried again. From any thread."""
        return self._reason is not None and self._task is None and self._may_begin

    def needed(self, error: Exception) -> None:
        """The catalogue was found damaged (`StoreCorrupt`), or cannot be relied on after `error`:
        take the store out. From any thread; `begin` follows."""
        self._core.health.take_out(State.REBUILDING if self._may_begin else State.FAILING)
        # Damage is the worse news: opened as it is, a damaged catalogue would fail again.
        if self._reason is None or isinstance(error, StoreCorrupt):
            self._reason = error

    def begin(self) -> None:
        """Do what is needed, if that may be done now and is not being done."""
        if self.is_due:
            self._task = asyncio.create_task(self._renew())

    async def drain(self) -> None:
        """Wait until no replacement is under way."""
        if self._task is not None:
            await self._task

    def _reopened(self) -> Opened:
        """By what is known now: who was still reading may have met damage meanwhile."""
        assert self._reason is not None
        return self._reopen(self._reason)

    @property
    def _may_begin(self) -> bool:
        return self._not_before is None or self._clock() >= self._not_before

    async def _renew(self) -> None:
        core = self._core
        core.health.take_out(State.REBUILDING)
        self._not_before = self._clock() + PAUSE_S
        try:
            await self._writer.rest()
            await self._reader.drain()
            await core.renew(self._reopened)
        except (OSError, KvtierError) as error:
            _log.error("NVMe store: its catalogue could not be opened anew: %s", error)
            core.health.take_out(State.FAILING)
        else:
            self._reason = None
            core.health.bring_back()
        finally:
            self._task = None
