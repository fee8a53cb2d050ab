"""A group's step before space is reserved: which records are encoded, and their encoding.

It decides on the loop by what the `Meter` knows, and works on the workers. Knows no space, no
segment and no queue.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from kvtier.tiers.nvme.outgoing import Record, encode_record, sample_block
from kvtier.tiers.nvme.pace import Meter
from kvtier.tiers.nvme.watch import Call
from kvtier.tiers.nvme.workers import Workers

_log = logging.getLogger(__name__)


class Encoder:
    """Encodes groups of records. `sample_bytes`: of what `auto` leaves raw, how much passes from
    one block that is encoded for trial to the next."""

    def __init__(self, workers: Workers, meter: Meter, sample_bytes: int) -> None:
        self._workers = workers
        self._meter = meter
        self._sample_bytes = sample_bytes
        self._unsampled_bytes = 0

    async def encode(self, group: Sequence[Record]) -> None:
        """Encode what is to be, so that exactly what will be stored can be reserved.

        A record whose bytes changed, or that cannot be encoded, gets an `error`; the others may
        be written.
        """
        meter = self._meter
        raw = [r for r in group if r.policy.codec == "auto" and not meter.pays(r.namespace)]
        for record in raw:
            self._unsampled_bytes += record.nbytes
            if self._unsampled_bytes > self._sample_bytes or not meter.knows(record.namespace):
                self._unsampled_bytes = 0
                job = partial(sample_block, record)
                try:
                    sample = await self._workers.submit(job, Call.WRITE, urgent=False)
                except Exception as error:  # noqa: BLE001 - goes to the put's flights
                    _log.error("NVMe encoding broke", exc_info=error)
                    record.error = error
                    continue
                meter.sampled(record.namespace, sample)
        chosen = [r for r in group if r.policy.codec != "raw" and r not in raw]
        jobs = [partial(encode_record, record) for record in chosen]
        futures = [self._workers.submit(job, Call.WRITE, urgent=False) for job in jobs]
        for record, failure in zip(chosen, await asyncio.gather(*futures), strict=True):
            record.error = failure
            if failure is None:
                meter.encoded(record.namespace, record.sizes, record.pool.block_bytes)
