"""Which sequences of a batch share their first positions, as kernels take it. Knows no blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Groups of sequences, each with a number of positions that its members share.

    members int32 `[groups, width]`: sequences by their row in the batch, padded with -1; lens int32
    `[groups]`: shared positions; seq_lens int32 `[seqs]`: the same for each sequence, 0 for those
    in no group. Made by `of`, so that the three agree.
    """

    members: Tensor
    lens: Tensor
    seq_lens: Tensor

    @classmethod
    def of(
        cls,
        groups: Sequence[tuple[Sequence[int], int]],
        seqs: int,
        device: torch.device | str = "cpu",
    ) -> "SharedPrefixes":
        """From `(members, shared positions)` of each group, of a batch of `seqs` sequences.

        Raises ValueError for a sequence in two groups or outside the batch, an empty group, or a
        negative length.
        """
        width = max((len(members) for members, _ in groups), default=0)
        table = torch.full((len(groups), width), -1, dtype=torch.int32)
        seq_lens = torch.zeros(seqs, dtype=torch.int32)
        seen: set[int] = set()
        for row, (members, length) in enumerate(groups):
            if not members or length < 0:
                raise ValueError(f"groups: {length} positions of {len(members)} sequences")
            for member in members:
                if member in seen or not 0 <= member < seqs:
                    raise ValueError(f"groups: sequence {member} is given twice or not in {seqs}")
                seen.add(member)
                seq_lens[member] = length
            table[row, : len(members)] = torch.tensor(members, dtype=torch.int32)
        lens = torch.tensor([length for _, length in groups], dtype=torch.int32)
        return cls(table.to(device), lens.to(device), seq_lens.to(device))
