"""The sidecar beside its limits: the control path in time, the data path against plain memcpy.

A real `kvtier serve` in its own process, this process as its engine. Physics: a control round trip
is two socket writes and four thread switches; block bytes cross memory once (slab to pool), so the
limit is one `copyto` between the same two memories, measured in the same run. The last line is
JSON.

    python -m bench.sidecar [--quick]
"""

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.harness import Sample, emit, interleave, measure, table
from kvtier.index.namespace import BlockLayout
from kvtier.index.words import ROOT_KEY, TierId, Tokens, block_keys
from kvtier.tiers.contracts import LANDED, Fetch, Flight, Put, Signal
from kvtier.tiers.device import CpuDevice
from kvtier.tiers.mover import Mover
from kvtier.tiers.pool import ArrayPool
from kvtier.tiers.sidecar import wire
from kvtier.tiers.sidecar.client import SidecarClient
from kvtier.tiers.sidecar.tier import SidecarTier

NAMESPACE = bytes(32)
SMALL = BlockLayout(layers=1, kv_heads=1, block_size=16, head_dim=32, dtype="float32")
# SmolLM2-135M in fp32: 720 KiB a block.
LARGE = BlockLayout(layers=30, kv_heads=3, block_size=16, head_dim=64, dtype="float32")
CLIENTS = 32
WAIT_S = 30.0


@contextmanager
def sidecar(dram_bytes: int) -> Iterator[Path]:
    """A running sidecar's socket."""
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory:
        path = Path(directory) / "s.sock"
        code = (
            "import sys; from pathlib import Path; from kvtier.tools.serve import serve; "
            "serve(Path(sys.argv[1]), None, dram_bytes=int(sys.argv[2]), nvme_bytes=1)"
        )
        command = [sys.executable, "-c", code, str(path), str(dram_bytes)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                server.stdout.readline()
                yield path
            finally:
                server.terminate()


class Engine:
    """The engine's side: a pool, a mover, the tier."""

    def __init__(self, path: Path, layout: BlockLayout, num_slots: int) -> None:
        self.layout = layout
        self.signal = Signal()
        self.device = CpuDevice(self.signal)
        self.mover = Mover(self.device)
        self.pool = ArrayPool(TierId.HBM, num_slots, layout.nbytes)
        self.pool.array[:] = 1
        self.tier = SidecarTier.connect(path, layout, mover=self.mover, signal=self.signal)

    def wait(self, condition: Callable[[], bool]) -> None:
        give_up = time.monotonic() + WAIT_S
        while True:
            ticks = self.signal.ticks
            if condition():
                return
            if time.monotonic() > give_up:
                raise TimeoutError("the sidecar gave no answer")
            self.signal.wait(ticks, 0.1)

    def finish(self, flight: Flight) -> None:
        self.wait(lambda: flight.done)
        if not bool((flight.status == LANDED).all()):
            raise RuntimeError(f"blocks failed: {flight.error}")

    def put(self, tokens: Tokens) -> None:
        keys = tuple(block_keys(NAMESPACE, ROOT_KEY, tokens, self.layout.block_size))
        slots = np.arange(len(keys), dtype=np.int32)
        none = tokens[:0]
        self.finish(
            self.tier.put(Put(NAMESPACE, ROOT_KEY, tokens, keys, none, self.pool, slots, None))
        )

    def fetch(self, tokens: Tokens) -> None:
        keys = tuple(block_keys(NAMESPACE, ROOT_KEY, tokens, self.layout.block_size))
        slots = np.arange(len(keys), dtype=np.int32)
        none = tokens[:0]
        self.finish(
            self.tier.fetch(Fetch(NAMESPACE, ROOT_KEY, tokens, keys, none, self.pool, slots))
        )

    def close(self) -> None:
        self.tier.close()
        self.device.close()


def tokens_of(num_blocks: int) -> Tokens:
    return np.arange(num_blocks * 16, dtype=np.int32)


def control(path: Path, repeats: int) -> tuple[Sample, Sample, Sample]:
    """Round trips: a request that does nothing, a one-block lookup, an acquire of 1,024 blocks.

    All blocks are resident in the sidecar's DRAM.
    """
    engine = Engine(path, SMALL, 1024)
    tokens = tokens_of(1024)
    engine.put(tokens)
    client = SidecarClient.connect(path, SMALL, client_name="bench")
    one, all_of_them = wire.ints_to_bytes(tokens[:16]), wire.ints_to_bytes(tokens)

    def lookup() -> None:
        client.call(wire.Lookup(client.new_id(), NAMESPACE, one, True), timeout_s=WAIT_S)

    leases: list[int] = []

    def acquire() -> None:
        leases.append(client.new_id())
        reply = client.call(wire.Acquire(leases[-1], NAMESPACE, all_of_them, 0), timeout_s=WAIT_S)
        if not isinstance(reply, wire.Progress) or len(reply.sources) != 1024:
            raise RuntimeError("not all of 1,024 blocks were acquired")

    def release() -> None:
        client.call(wire.Release(client.new_id(), leases.pop()), timeout_s=WAIT_S)

    def nothing() -> None:
        client.call(wire.Release(client.new_id(), 0), timeout_s=WAIT_S)

    bare, rtt = interleave([nothing, lookup], repeats)
    seconds: list[float] = []
    for _ in range(max(10, repeats // 50)):
        seconds += measure(acquire, 1, warmup=0).seconds
        release()
    client.close()
    engine.close()
    return bare, rtt, Sample(tuple(seconds))


def many_clients(path: Path, rounds: int) -> float:
    """Operations a second of 32 connections in lockstep, driven by one process."""
    connections = []
    hello = wire.encode(wire.Hello(1, wire.PROTOCOL_VERSION, wire.WireLayout.of(SMALL), "bench"))
    for _ in range(CLIENTS):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(str(path))
        connection.sendall(hello)
        connection.recv(4096)
        connections.append(connection)
    frame = wire.encode(wire.Lookup(2, NAMESPACE, wire.ints_to_bytes(tokens_of(1)), True))
    begin = time.perf_counter()
    for _ in range(rounds):
        for connection in connections:
            connection.sendall(frame)
        for connection in connections:
            connection.recv(4096)
    seconds = time.perf_counter() - begin
    for connection in connections:
        connection.close()
    return rounds * CLIENTS / seconds


def bytes_moved(path: Path, num_blocks: int, repeats: int) -> tuple[Sample, Sample, Sample]:
    """Fetch and put of the same blocks, beside one `copyto` of as many bytes."""
    engine = Engine(path, LARGE, num_blocks)
    tokens = tokens_of(num_blocks)
    engine.put(tokens)
    mapped = SidecarClient.connect(path, LARGE, client_name="memcpy")
    if mapped.slab is None:
        raise RuntimeError("the sidecar gave no slab")
    source = mapped.slab.array[:num_blocks]
    turn = [0]

    def fetch() -> None:
        engine.fetch(tokens)

    def put() -> None:
        turn[0] += 1
        engine.put(tokens + 100_000 * turn[0])

    def memcpy() -> None:
        np.copyto(engine.pool.array, source)

    fetched, copied = interleave([fetch, memcpy], repeats)
    stored = measure(put, max(3, repeats // 3), warmup=1)
    mapped.close()
    mapped.slab.close()
    engine.close()
    return fetched, stored, copied


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, fewer bytes")
    quick = parser.parse_args().quick
    with sidecar(4096 * SMALL.nbytes) as path:
        bare, rtt, acquire = control(path, 500 if quick else 5000)
        operations = many_clients(path, 50 if quick else 500)
    num_blocks = 64 if quick else 256
    with sidecar(3 * num_blocks * LARGE.nbytes) as path:
        fetched, stored, copied = bytes_moved(path, num_blocks, 5 if quick else 20)
    gigabytes = num_blocks * LARGE.nbytes / 1e9
    ratio = copied.median / fetched.median
    table(
        [
            ["what", "median", "p80", "limit"],
            ["bare round trip, us", bare.median * 1e6, bare.p80 * 1e6, ""],
            ["control round trip (lookup), us", rtt.median * 1e6, rtt.p80 * 1e6, "150"],
            ["acquire 1,024 resident blocks, ms", acquire.median * 1e3, acquire.p80 * 1e3, "5"],
            ["slab to pool, GB/s", gigabytes / fetched.median, gigabytes / fetched.p80, "memcpy"],
            ["memcpy, GB/s", gigabytes / copied.median, gigabytes / copied.p80, ""],
            [
                "pool to slab, checksummed twice, GB/s",
                gigabytes / stored.median,
                gigabytes / stored.p80,
                "",
            ],
            ["32 clients in lockstep, operations/s", operations, "", "driver's one core"],
        ]
    )
    emit(
        {
            "bare_rtt_p50_us": bare.median * 1e6,
            "rtt_p50_us": rtt.median * 1e6,
            "rtt_p99_us": rtt.p99 * 1e6,
            "acquire_1k_blocks_ms": acquire.median * 1e3,
            "throughput_ratio_memcpy": ratio,
            "put_gb_s": gigabytes / stored.median,
            "clients_32_ops_s": operations,
        }
    )


if __name__ == "__main__":
    main()
