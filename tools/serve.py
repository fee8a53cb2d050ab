"""`kvtier serve`: run the sidecar until SIGTERM or SIGINT. Loads no torch."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

from kvtier.index.policies import DEFAULT_POLICY
from kvtier.tiers.memory import require
from kvtier.tiers.nvme.codecs import CodecPolicy
from kvtier.tiers.sidecar.server import SidecarServer
from kvtier.tiers.writeback import WRITEBACK_S


def serve(
    socket: Path,
    store: Path | None,
    *,
    dram_bytes: int,
    nvme_bytes: int,
    codec: str = "raw",
    writeback_s: float | None = WRITEBACK_S,
    write_budget_bytes: int | None = None,
    dram_policy: str = DEFAULT_POLICY,
    nvme_admission: str = "all",
) -> None:
    """Serve on `socket`; return after a graceful stop.

    Prints one line once clients can connect. Raises `NotEnoughMemory` if the slab, which is made
    for the first client, could not be had now, `CodecUnknown`, and what
    `SidecarServer.start` raises.
    """
    CodecPolicy(codec)
    require(dram_bytes, f"--dram of {dram_bytes:,} bytes")
    server = SidecarServer(
        socket,
        store,
        dram_bytes=dram_bytes,
        nvme_bytes=nvme_bytes,
        codec=codec,
        writeback_s=writeback_s,
        write_budget_bytes=write_budget_bytes,
        dram_policy=dram_policy,
        nvme_admission=nvme_admission,
    )
    asyncio.run(_serve(server))


async def _serve(server: SidecarServer) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await server.start()
    _say(f"ready, pid {os.getpid()}, {server}")
    await stop.wait()
    # A second signal ends the process at once, whatever is still being written down.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
    _say("stopping, writing DRAM down to the store")
    await server.stop()


def _say(text: str) -> None:
    """Whether anybody still reads our output must not matter to the clients."""
    with suppress(BrokenPipeError):
        print(f"kvtier serve: {text}", flush=True)
