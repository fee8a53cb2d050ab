"""A process that damages a copy of a store's catalogue, and uses the store. Says what it survived.

damage_child.py STORE SCRATCH FIRST_SEED COUNT
"""

import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvtier.tiers.errors import StoreCorrupt
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.pages import audit_pages
from tests.nvme.rig import Rig, branch

PAGE = 4096
CAPACITY = 800 << 10
"""Of blocks of 200 bytes, so that the tables are some pages large."""
SPACES = (bytes(range(32)), bytes(32))


def build(store: Path) -> None:
    """A store with evictions, freed pages, two namespaces and records that hang off others."""
    for turn in range(3):
        with Rig(store, files=Files(direct=False), block_bytes=200, capacity_bytes=CAPACITY) as rig:
            for seed in range(9 * turn, 9 * turn + 12):
                space = SPACES[seed % 2]
                trunk = branch(9, seed, namespace=space)
                rig.put(trunk, namespace=space)
                for limb in range(2):
                    twig = branch(1, 100 + 2 * seed + limb, parent=trunk.keys[2], namespace=space)
                    rig.put(twig, namespace=space)


def in_use(path: Path, tables: Mapping[bytes, bool]) -> list[int]:
    """Pages of an LMDB file that hold something: a false number in one is found out."""
    data = path.read_bytes()
    used = []
    for page in range(len(data) // PAGE):
        spoilt = bytearray(data)
        spoilt[page * PAGE] ^= 0x40
        path.write_bytes(spoilt)
        try:
            audit_pages(path, tables, map_bytes=1 << 30)
        except StoreCorrupt:
            used.append(page)
    path.write_bytes(data)
    return used


def damage(data: bytearray, used: Sequence[int], chance: random.Random) -> str:
    """Change an LMDB file in one of the ways in which disks do, mostly where it holds something."""
    pages = len(data) // PAGE
    page = PAGE * (chance.choice(used) if chance.random() < 0.9 else chance.randrange(pages))
    kind = chance.choice(("head", "flip", "flip", "flip", "scramble", "zero", "copy", "cut"))
    if kind in ("head", "flip"):
        at = page + chance.randrange(32 if kind == "head" else PAGE)
        while kind == "flip" and not data[at]:  # not in the empty middle of a page
            at = page + chance.randrange(PAGE)
        data[at] ^= 1 << chance.randrange(8)
    elif kind == "scramble":
        data[page : page + PAGE] = chance.randbytes(PAGE)
    elif kind == "zero":
        data[page : page + PAGE] = bytes(PAGE)
    elif kind == "copy":
        other = chance.randrange(pages) * PAGE
        data[page : page + PAGE] = data[other : other + PAGE]
    else:
        del data[chance.randrange(len(data)) :]
    return kind


def use(store: Path, seed: int) -> int:
    """Look up, fetch (the rig compares every byte) and put. Returns how many blocks were served."""
    served = 0
    with Rig(store, files=Files(direct=False), block_bytes=200, capacity_bytes=CAPACITY) as rig:
        for each in range(6, 30):
            space = SPACES[each % 2]
            trunk = branch(9, each, namespace=space)
            rig.lookup(trunk, namespace=space)
            served += int((rig.fetch(trunk, namespace=space).status == 1).sum())
        for each in range(3):
            fresh = branch(5, 1000 + seed + each)
            rig.put(fresh)
            rig.fetch(fresh)
    return served


def main() -> None:
    store, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    used = in_use(store / "catalog" / "data.mdb", {})
    for seed in range(int(sys.argv[3]), int(sys.argv[3]) + int(sys.argv[4])):
        copy = scratch / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(store, copy)
        file = copy / "catalog" / "data.mdb"
        data = bytearray(file.read_bytes())
        kind = damage(data, used, random.Random(seed))
        file.write_bytes(data)
        sys.stdout.write(f"{seed} {kind} ")
        sys.stdout.flush()
        served = use(copy, seed)
        use(copy, seed)
        sys.stdout.write(f"{served} {int((copy / 'catalog.damaged').exists())}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
