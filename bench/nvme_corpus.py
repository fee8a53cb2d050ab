"""A store of very many small blocks, as a prompt cache grows one: documents with questions.

Each document is a trunk of 64 blocks from the root and four tails of 16 that fork off its end;
blocks are 4 KiB, four an extent, put through the real put path. A block's first bytes are its key,
so that whoever fetches it can see whether it is the right one. Knows no measurement but how long
the building took.
"""

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.harness import note
from bench.nvme_client import NO_LIMIT, Branch, Client
from kvtier.index.words import KEY_BYTES, BlockKey, Slots
from kvtier.tiers.dram import DramSlab
from kvtier.tiers.nvme.settings import Geometry

BLOCK_BYTES = 4096
EXTENT_BLOCKS = 4
GEOMETRY = Geometry(extent_bytes=EXTENT_BLOCKS * BLOCK_BYTES)
TRUNK, TAIL, NUM_TAILS = 64, 16, 4
DOCUMENT_BLOCKS = TRUNK + NUM_TAILS * TAIL
PROMPT_BLOCKS = TRUNK + TAIL
DISK_BYTES_PER_BLOCK = BLOCK_BYTES + BLOCK_BYTES // EXTENT_BLOCKS + 1024
"""A block, its share of a header page, and room for the catalogue."""

_MANIFEST = "built.json"
_BATCH = 32


@dataclass(frozen=True)
class Corpus:
    """A built store: the directory that holds it, how many blocks, how long building took."""

    directory: Path
    num_blocks: int
    build_s: float

    @property
    def store(self) -> Path:
        return self.directory / "store"

    @property
    def catalogue(self) -> Path:
        return self.store / "catalog" / "data.mdb"


def trunk(document: int) -> Branch:
    return Branch.make([document, 0], TRUNK)


def tail(document: int, number: int, above: Branch) -> Branch:
    """Tail `number` (from 0) below a document's trunk."""
    return Branch.make([document, number + 1], TAIL, above.keys[-1])


def prompts(num_blocks: int, seed: int) -> Iterator[Branch]:
    """Random whole prompts of a store of `num_blocks`, without end: a trunk and one of its tails.

    The oldest eighth of the documents is left out: `probe.evict` lives on it.
    """
    rng = np.random.default_rng(seed)
    num_documents = num_blocks // DOCUMENT_BLOCKS
    while True:
        document = int(rng.integers(num_documents // 8, num_documents))
        above = trunk(document)
        yield above.then(tail(document, int(rng.integers(NUM_TAILS)), above))


def stamp(slab: DramSlab, slots: Slots, keys: tuple[BlockKey, ...]) -> None:
    """Write each block's key at the start of its slot."""
    slab.array[slots, :KEY_BYTES] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)


def stamped(slab: DramSlab, slots: Slots, keys: tuple[BlockKey, ...]) -> bool:
    """Whether each slot holds its key's block."""
    return slab.array[slots, :KEY_BYTES].tobytes() == b"".join(keys)


def open_or_build(directory: Path, num_blocks: int) -> Corpus:
    """The store in `directory`, built unless it is there; at least `num_blocks` blocks.

    Ends the program if the directory holds anything else, or if the disk lacks the room.
    """
    num_blocks = -(-num_blocks // DOCUMENT_BLOCKS) * DOCUMENT_BLOCKS
    manifest = directory / _MANIFEST
    if manifest.exists():
        found = Corpus(directory, **json.loads(manifest.read_text()))
        if found.num_blocks != num_blocks:
            raise SystemExit(
                f"{directory}: a store of {found.num_blocks:,} blocks, wanted {num_blocks:,}; "
                "remove it or name another directory"
            )
        return found
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise SystemExit(f"{directory}: holds no finished store of this bench; name an empty one")
    require(directory, num_blocks * DISK_BYTES_PER_BLOCK, f"a store of {num_blocks:,} blocks")
    begin = time.perf_counter()
    _build(directory / "store", num_blocks)
    corpus = Corpus(directory, num_blocks, round(time.perf_counter() - begin, 1))
    values = asdict(corpus)
    del values["directory"]
    manifest.write_text(json.dumps(values))
    return corpus


def require(directory: Path, nbytes: int, what: str) -> None:
    """Ends the program unless the disk has room for `what`."""
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise SystemExit(
            f"{directory}: {what} takes {nbytes / 1e9:.1f} GB of disk, {free / 1e9:.1f} GB are "
            "free; name another directory"
        )


def _build(store: Path, num_blocks: int) -> None:
    slab = DramSlab.create(_BATCH * DOCUMENT_BLOCKS, BLOCK_BYTES)
    slab.array[:] = np.random.default_rng(3).integers(0, 256, slab.array.shape, np.uint8)
    client = Client(store, slab, NO_LIMIT, GEOMETRY)
    num_documents = num_blocks // DOCUMENT_BLOCKS
    try:
        for first in range(0, num_documents, _BATCH):
            _put_documents(client, slab, range(first, min(first + _BATCH, num_documents)))
            if first // _BATCH % 16 == 0:
                note(f"building {num_blocks:,} blocks: {first / num_documents:.0%}")
        held = client.tier.statistics().blocks
        if held != num_blocks:
            raise SystemExit(f"{store}: holds {held:,} blocks after {num_blocks:,} were put")
    finally:
        client.close()
        slab.close()


def _put_documents(client: Client, slab: DramSlab, documents: range) -> None:
    flights, at = [], 0
    for document in documents:
        above = trunk(document)
        for branch in (above, *(tail(document, i, above) for i in range(NUM_TAILS))):
            slots = client.slots[at : at + len(branch.keys)]
            at += len(branch.keys)
            stamp(slab, slots, branch.keys)
            flights.append(client.begin_put(branch, slots))
    for flight in flights:
        client.finish(flight)
