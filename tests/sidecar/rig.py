"""A real sidecar process, an engine's side of it, and a client that may misbehave."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtier.index.namespace import BlockLayout
from kvtier.index.words import ROOT_KEY, BlockKey, Slots, TierId, Tokens, block_keys
from kvtier.tiers.contracts import Answer, Fetch, Flight, Put, Signal
from kvtier.tiers.device import CpuDevice
from kvtier.tiers.mover import Mover
from kvtier.tiers.pool import ArrayPool
from kvtier.tiers.sidecar import wire
from kvtier.tiers.sidecar.client import observe
from kvtier.tiers.sidecar.tier import SidecarTier
from kvtier.tiers.writeback import WRITEBACK_S
from tests.prf import block_bytes

# An odd shape whose blocks are no whole number of pages.
LAYOUT = BlockLayout(layers=2, kv_heads=3, block_size=8, head_dim=10, dtype="float32")
SIZE = LAYOUT.block_size
SLOT_BYTES = 4096
NAMESPACE = bytes(range(32))
PATIENCE_S = 30.0

# Ends with its parent, so that a test run that is killed leaves nothing behind.
_PROLOGUE = "import ctypes; ctypes.CDLL(None).prctl(1, 9); from pathlib import Path; "
_SERVE = _PROLOGUE + (
    "from kvtier.tools.serve import serve; import sys; "
    "store = Path(sys.argv[2]) if sys.argv[2] else None; "
    "serve(Path(sys.argv[1]), store, dram_bytes=int(sys.argv[3]), nvme_bytes=int(sys.argv[4]), "
    "writeback_s=float(sys.argv[5]), nvme_admission=sys.argv[6])"
)


def python(code: str, *arguments: object) -> "subprocess.Popen[str]":
    """A Python process of its own with pipes, that ends with this one."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]", number: int) -> tuple[int, str, str]:
    """Signal a process and wait for its end: exit status, stdout, stderr."""
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def wait_for(condition: Callable[[], bool], signal: Signal | None = None) -> None:
    """Return once `condition` holds; fail the test if it does not for too long."""
    wake = signal or Signal()
    give_up = time.monotonic() + PATIENCE_S
    while True:
        ticks = wake.ticks
        if condition():
            return
        assert time.monotonic() < give_up, "waited too long"
        wake.wait(ticks, 0.02)


class Sidecar:
    """`kvtier serve` in a process of its own; `num_slots` blocks of `LAYOUT`."""

    def __init__(
        self,
        directory: Path,
        *,
        num_slots: int = 64,
        store: bool = True,
        writeback_s: float = WRITEBACK_S,
        nvme_bytes: int = 64 << 20,
        nvme_admission: str = "all",
    ) -> None:
        self.socket = directory / "s.sock"
        self.store = directory / "store" if store else None
        self.num_slots = num_slots
        self.options = (writeback_s, nvme_admission)
        self.nvme_bytes = nvme_bytes
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def launch(self) -> "subprocess.Popen[str]":
        place = (self.socket, self.store or "", self.num_slots * SLOT_BYTES, self.nvme_bytes)
        return python(_SERVE, *place, *self.options)

    def start(self) -> "Sidecar":
        self._process = self.launch()
        assert self._process.stdout is not None
        assert "ready" in self._process.stdout.readline()
        return self

    def freeze(self) -> None:
        """Stop the process as a hang would; returns once it has stopped."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        state = Path(f"/proc/{self.pid}/stat")
        wait_for(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        assert self._process is not None
        process, self._process = self._process, None
        return finish(process, number)

    def close(self) -> None:
        if self._process is not None:
            self.end(signal.SIGKILL)

    def numbers(self) -> dict[str, int | float]:
        return observe(self.socket).numbers


def tokens_of(num_blocks: int, seed: int = 0) -> Tokens:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 50_000, num_blocks * SIZE).astype(np.int32)


def keys_of(tokens: Tokens, namespace: bytes = NAMESPACE) -> list[BlockKey]:
    return block_keys(namespace, ROOT_KEY, tokens, SIZE)


@dataclass
class Engine:
    """What an engine has: a top pool full of NaN, a mover, a signal; and the tier under test."""

    hbm: ArrayPool
    device: CpuDevice
    mover: Mover
    signal: Signal
    tier: SidecarTier

    @classmethod
    def beside(
        cls, sidecar: Sidecar, *, num_slots: int = 64, deadline_s: float = PATIENCE_S
    ) -> "Engine":
        signal = Signal()
        device = CpuDevice(signal)
        mover = Mover(device)
        tier = SidecarTier.connect(
            sidecar.socket, LAYOUT, mover=mover, signal=signal, deadline_s=deadline_s
        )
        hbm = ArrayPool(TierId.HBM, num_slots, LAYOUT.nbytes, debug=True)
        return cls(hbm, device, mover, signal, tier)

    def close(self) -> None:
        self.tier.close()
        self.device.close()

    def start_put(self, tokens: Tokens, first: int = 0) -> tuple[Flight, Slots]:
        """Compute blocks `first…` of a path and put them."""
        keys = keys_of(tokens)
        slots = self.hbm.alloc(len(keys) - first)
        for slot, key in zip(slots.tolist(), keys[first:], strict=True):
            self.hbm.view(slot)[:] = block_bytes(key, LAYOUT.nbytes)
        prefix, rest = tokens[: first * SIZE], tokens[first * SIZE :]
        parent = keys[first - 1] if first else ROOT_KEY
        flight = self.tier.put(
            Put(NAMESPACE, parent, rest, tuple(keys[first:]), prefix, self.hbm, slots, None)
        )
        return flight, slots

    def put(self, tokens: Tokens, first: int = 0) -> Flight:
        flight, slots = self.start_put(tokens, first)
        self.wait(lambda: flight.done)
        self.hbm.free(slots)
        return flight

    def start_fetch(self, tokens: Tokens, first: int = 0) -> tuple[Flight, Slots]:
        keys = keys_of(tokens)
        slots = self.hbm.alloc(len(keys) - first)
        prefix, rest = tokens[: first * SIZE], tokens[first * SIZE :]
        parent = keys[first - 1] if first else ROOT_KEY
        flight = self.tier.fetch(
            Fetch(NAMESPACE, parent, rest, tuple(keys[first:]), prefix, self.hbm, slots)
        )
        return flight, slots

    def fetch(self, tokens: Tokens, first: int = 0) -> tuple[Flight, list[bool]]:
        """Fetch blocks `first…` of a path; for each, whether the right bytes stand in its slot."""
        flight, slots = self.start_fetch(tokens, first)
        self.wait(lambda: flight.done)
        right = [
            bool(np.array_equal(self.hbm.view(slot), block_bytes(key, LAYOUT.nbytes)))
            for slot, key in zip(slots.tolist(), keys_of(tokens)[first:], strict=True)
        ]
        self.hbm.free(slots)
        return flight, right

    def held(self, tokens: Tokens, keys: Sequence[BlockKey] | None = None) -> int:
        return self.answer(
            self.tier.lookup(NAMESPACE, keys_of(tokens) if keys is None else keys, tokens)
        )

    def answer(self, answer: Answer) -> int:
        self.wait(lambda: answer.done)
        assert answer.value is not None
        return answer.value

    def wait(self, condition: Callable[[], bool]) -> None:
        wait_for(condition, self.signal)


class RawClient:
    """Speaks frames, sound or not, one at a time. Keeps no slab."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(PATIENCE_S)
        self._socket.connect(str(path))
        self._frames = wire.FrameReader()
        self._replies: list[wire.Reply] = []
        self._next_id = 100

    @classmethod
    def greeted(cls, path: Path) -> "RawClient":
        client = cls(path)
        assert isinstance(client.hello(), wire.Welcome)
        return client

    def hello(self, layout: BlockLayout = LAYOUT, version: int = wire.PROTOCOL_VERSION) -> object:
        return self.ask(wire.Hello(1, version, wire.WireLayout.of(layout), "raw"))

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def ask(self, request: wire.Request) -> wire.Reply | None:
        self.send_bytes(wire.encode(request))
        return self.receive()

    def reserve(self, count: int, wait_ms: int = 0) -> wire.Reply | None:
        return self.ask(wire.Reserve(self.new_id(), count, wait_ms))

    def receive(self) -> wire.Reply | None:
        """The next reply; None once the server has closed the connection."""
        while not self._replies:
            try:
                data = self._socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._replies += [wire.decode_reply(body) for body in self._frames.feed(data)]
        return self._replies.pop(0)

    def close(self) -> None:
        self._socket.close()
