"""How many programs fit an SM, and what share of read bandwidth they can draw: a model.

A part of `bench.kernels_static`. Arithmetic only; nothing here was measured.

Occupancy follows the CUDA programming guide's table "Technical Specifications per Compute
Capability": of 8.0, 9.0 and 10.0 alike, 64 K registers in four partitions, 64 warps and 32 programs
an SM; registers are given to a warp in units of 256, shared memory to a program with 1 KB for the
system. Bandwidth follows Little's law: to draw B bytes a second at a latency of L seconds, B * L
bytes must be on their way all the time.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """One architecture's fastest common card.

    `shared_kb`: of an SM and, less 1, of one program. `bandwidth`: peak HBM read, bytes a second.
    `latency_s`: of a read under load. `flops`: dense 16-bit tensor cores; `flops32`: float32
    outside of them.
    """

    name: str
    shared_kb: int
    sms: int
    bandwidth: float
    latency_s: float
    flops: float
    flops32: float

    @property
    def need(self) -> float:
        """Bytes in flight an SM needs for the whole bandwidth."""
        return self.bandwidth * self.latency_s / self.sms


# Bandwidth, SMs and arithmetic: the vendor's data sheets. Latency under load: the estimate of
# `kernels/configs.py`; an idle one is 0.27 to 0.33 us.
MACHINES = {
    80: Machine("A100 80GB SXM", 164, 108, 2.039e12, 0.60e-6, 312e12, 19.5e12),
    90: Machine("H200 SXM", 228, 132, 4.8e12, 0.65e-6, 989e12, 67e12),
    100: Machine("B200", 228, 148, 8.0e12, 0.70e-6, 2250e12, 75e12),
}

_REGISTERS, _WARPS, _PROGRAMS = 65536, 64, 32


def occupancy(machine: Machine, registers: int, shared: int, warps: int) -> int:
    """Programs resident on an SM at once; 0 if one does not fit."""
    a_warp = -(-max(registers, 1) * 32 // 256) * 256
    by_registers = _REGISTERS // 4 // a_warp * 4 // warps
    by_shared = (machine.shared_kb << 10) // (-(-shared // 128) * 128 + 1024)
    return min(by_registers, by_shared, _WARPS // warps, _PROGRAMS)


def buffered(stages: int) -> int:
    """Tiles of K and V that Triton's pipeline holds for one program.

    Of `stages - 1` steps half go to the block table's load, on which K's and V's addresses hang.
    """
    return max(1, (stages - 1) // 2)


@dataclass(frozen=True)
class Roofline:
    """What a decode launch can draw. `in_flight`: bytes an SM; `share`: of peak read bandwidth."""

    in_flight: float
    intensity: float
    balance: float
    share: float


def decode_roofline(
    machine: Machine, *, programs: int, stages: int, tile_bytes: int, flops: float, tensor: bool
) -> Roofline:
    """`tile_bytes` of K and V in one step of the loop, and `flops` spent on them, padding included.

    A program has all its buffers but the one in use in flight, and that one too while it waits:
    counted as half. The share is the least of bytes in flight over bytes needed, machine balance
    over intensity, and 1; launch, merge and imbalance are left out.
    """
    depth = buffered(stages)
    in_flight = programs * (depth - 0.5) * tile_bytes
    intensity = flops / tile_bytes
    balance = (machine.flops if tensor else machine.flops32) / machine.bandwidth
    share = min(1.0, in_flight / machine.need, balance / intensity)
    return Roofline(in_flight, intensity, balance, share)
