"""The thread that looks whether the others still move. Knows the tier by three callables only.

It is apart from the tier's loop because the loop itself can hang: LMDB reads through a memory map,
and a page fault on a hung drive stops the thread that touches the page.
"""

import threading
from collections.abc import Callable

from kvtier.tiers.nvme.health import Health
from kvtier.tiers.nvme.watch import Call, Watch

_LOOKS = 4
"""In the time that a read may take."""


class Watchdog:
    """Takes a hung drive out, answers everyone who waits for it, and brings it back.

    `ping(pong)` has the tier's loop call `pong`; `probe()` has it try a read and tell `health`.
    """

    def __init__(
        self,
        watch: Watch,
        health: Health,
        stall_s: float,
        *,
        ping: Callable[[Callable[[], None]], None],
        probe: Callable[[], None],
    ) -> None:
        self._watch = watch
        self._health = health
        self._period_s = stall_s / _LOOKS
        self._ping = ping
        self._probe = probe
        self._pinging = False
        self._thread = threading.Thread(target=self._run, name="kvtier-nvme-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; it may be asleep, never hung."""
        self._watch.end()
        self._thread.join()

    def look(self) -> None:
        """One look around. Never blocks."""
        self._watch.expire()
        call = self._watch.overdue()
        if call is not None:
            self._health.hung(call)
        if self._health.is_hung:
            self._health.stalled(self._watch.give_up(self._health.refusal()))
            if call is None:
                self._health.returned()
        if self._health.probe_reads():
            self._probe()
        if not self._pinging:
            self._pinging = True
            number = self._watch.began(Call.LOOP)
            self._ping(lambda: self._pong(number))

    def _pong(self, number: int) -> None:
        self._watch.ended(number)
        self._pinging = False

    def _run(self) -> None:
        while self._watch.sleep(self._period_s, awake=lambda: not self._health.serves):
            self.look()
