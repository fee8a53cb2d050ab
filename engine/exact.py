"""Exact mode: a hit and a miss give the same bits. What was settled for it when the engine started.

Every row passes the model in a launch of one of two fixed row counts, a prompt's chunk or the
decoding batch, on a fixed number of threads: `engine/cuts.py` cuts the tokens so, the runner pads,
and `engine/proofs.py` shows that nothing else matters on this machine. (He et al., "Defeating
nondeterminism in LLM inference", 2025, on why the row count decides the bits.) Knows the model and
the attention backends; not requests, nor the cache.
"""

from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from kvtier.engine.batch import Padding
from kvtier.engine.errors import NotExact
from kvtier.engine.model import LlamaModel
from kvtier.engine.proofs import AttentionProof, MakeAttention, prove_rows_independent, stages

KERNELS = 1
"""Part of every exact namespace. Raise it with any change to kernels/, engine/model.py, rope.py,
the attention backends, or the way weights.py fuses tensors, that may change one bit of K or V."""


@dataclass(frozen=True)
class Exact:
    """chunk, batch: rows of a launch that computes part of a prompt, and of one that decodes.

    threads: of torch on the CPU; 0 on a GPU, where they do not matter. name: what the bits depend
    on besides; part of the namespace of every block.
    """

    chunk: int
    batch: int
    threads: int
    name: str

    @property
    def prompt_rows(self) -> Padding:
        return Padding(self.chunk, self.batch)

    @property
    def decode_rows(self) -> Padding:
        return Padding(self.batch, self.batch)

    def refuse_other_threads(self) -> None:
        """Raise `NotExact` if someone has changed torch's number of threads since."""
        if self.threads and torch.get_num_threads() != self.threads:
            raise NotExact(
                f"exact mode: torch now runs {torch.get_num_threads()} threads, the engine was "
                f"started with {self.threads}; set them before it starts, for the whole process"
            )


def settle_exact(
    model: LlamaModel, make_attention: MakeAttention, block_size: int, chunk: int, batch: int
) -> Exact:
    """Prove that this machine keeps the promise, and name what the bits depend on.

    Pins torch's threads at their present number. `make_attention` is given a pool of its own. Takes
    about as long as ten chunks of a prompt in one layer. Raises `NotExact`.
    """
    threads = _pin_threads(model.device)
    digest = blake2b(digest_size=16)
    for rows in (chunk, batch):
        for name, stage, inputs in stages(model, rows, with_logits=rows == batch):
            result = prove_rows_independent(f"{name} of {rows} rows", stage, inputs)
            if rows == chunk:  # decoded blocks are not shared
                digest.update(_content(result))
    digest.update(_content(AttentionProof(model, make_attention, block_size, chunk, batch).run()))
    parts = {
        "chunk": chunk,
        "kernels": KERNELS,
        "threads": threads,
        "torch": torch.__version__,
        "device": _device_name(model.device),
        "probe": digest.hexdigest(),
    }
    name = ";".join(f"{key}={value}" for key, value in parts.items())
    return Exact(chunk, batch, threads, name)


def _pin_threads(device: torch.device) -> int:
    """Say the number aloud, so that no library takes fewer threads when it thinks fit."""
    if device.type != "cpu":
        return 0
    threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    return threads


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return torch.backends.cpu.get_cpu_capability()
    return f"{torch.cuda.get_device_name(device)} {torch.version.cuda}"


def _content(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
