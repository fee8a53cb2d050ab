"""Scratch memory of the decode kernels, and how a pool is shown to them. Knows sizes, no tables."""

import torch
from torch import Tensor

from kvtier.kernels.configs import architecture


class DecodeWorkspace:
    """Room for the splits of one decode launch at a time, reused by launches of one stream.

    partial float32, weight float32: results of single splits. arrived int32: programs that have
    ended, zeros between launches (a launch leaves them as it found them). Its addresses never
    change, so that a captured graph may hold them.
    """

    def __init__(
        self, seqs: int, heads: int, head_dim: int, splits: int, device: torch.device | str
    ) -> None:
        rows = seqs * heads * splits
        self.partial = torch.empty(rows * head_dim, dtype=torch.float32, device=device)
        self.weight = torch.empty(rows, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(seqs * heads, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return self.partial.nbytes + self.weight.nbytes + self.arrived.nbytes

    def fits(self, seqs: int, heads: int, head_dim: int, splits: int) -> bool:
        """Whether a launch of these sizes has room."""
        rows = seqs * heads * splits
        return (
            rows * head_dim <= len(self.partial)
            and rows <= len(self.weight)
            and seqs * heads <= len(self.arrived)
        )

    def require(self, seqs: int, heads: int, head_dim: int, splits: int) -> None:
        """Raise ValueError if a launch of these sizes has no room."""
        if not self.fits(seqs, heads, head_dim, splits):
            raise ValueError(
                f"workspace: {self.nbytes} bytes are too few for {seqs} sequences of {heads} heads "
                f"of {head_dim} in {splits} splits; make a larger one"
            )


def readable(pool: Tensor) -> Tensor:
    """The pool as a kernel on its device reads it: e4m3 as bytes where the machine has no e4m3."""
    if pool.dtype == torch.float8_e4m3fn and architecture(pool.device) < 89:
        return pool.view(torch.uint8)
    return pool
