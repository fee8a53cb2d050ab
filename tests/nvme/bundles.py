"""Stores with a small tree of branches, and bundles made of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.index.words import BlockKey
from kvtier.tiers.contracts import Bytes
from kvtier.tiers.nvme.bundle_export import ExportReport, export_bundle
from kvtier.tiers.nvme.bundle_import import ImportReport, import_bundle
from kvtier.tiers.nvme.bundle_plan import EVERYTHING, Selection
from kvtier.tiers.nvme.files import Files
from tests.nvme.rig import Branch, Rig, branch, num_landed

OTHER = b"o" * 32


@dataclass(frozen=True)
class Tree:
    """A trunk of 7 blocks, a limb of 4 off its second, a twig of 2 off the limb's last, a tree of
    its own of 5, and 3 blocks of another namespace."""

    trunk: Branch
    limb: Branch
    twig: Branch
    alone: Branch
    foreign: Branch

    @classmethod
    def make(cls) -> "Tree":
        trunk = branch(7)
        limb = branch(4, 1, parent=trunk.keys[1])
        twig = branch(2, 2, parent=limb.keys[3])
        return cls(trunk, limb, twig, branch(5, 3), branch(3, 4, namespace=OTHER))


def grown(store: Path, block_bytes: int = 5000, **options: Any) -> Tree:
    """A store that holds the tree."""
    tree = Tree.make()
    with Rig(store, block_bytes=block_bytes, **options) as rig:
        for part in (tree.trunk, tree.limb, tree.twig, tree.alone):
            assert num_landed(rig.put(part)) == len(part.keys)
        assert num_landed(rig.put(tree.foreign, namespace=OTHER)) == 3
    return tree


def bring(bundle: Path, rig: Rig, **options: Any) -> ImportReport:
    """Import; every block is counted once, and what is said to be there is."""
    report = import_bundle(bundle, rig.tier, **options)
    counted = report.imported + report.already_there + report.refused + report.damaged
    assert counted == report.blocks
    return report


def held(rig: Rig, tree: Tree) -> dict[str, int]:
    """How many leading blocks of each branch a fetch brings, every byte compared; a branch whose
    parent is not there has none (or the store is not prefix-closed)."""
    found = {name: rig.landed(getattr(tree, name)) for name in ("trunk", "limb", "twig", "alone")}
    found["foreign"] = num_landed(rig.fetch(tree.foreign, namespace=OTHER))
    assert found["limb"] == 0 or found["trunk"] >= 2
    assert found["twig"] == 0 or found["limb"] == 4
    return found


ALL = {"trunk": 7, "limb": 4, "twig": 2, "alone": 5, "foreign": 3}
NONE = dict.fromkeys(ALL, 0)


def exported(
    store: Path, bundle: Path, selection: Selection = EVERYTHING, **options: Any
) -> ExportReport:
    report = export_bundle(store, bundle, selection, **options)
    assert report.ok, report
    return report


def prefixes(*keys: BlockKey) -> Selection:
    return Selection(prefixes=keys)


class Killed(BaseException):
    """Nobody catches this."""


class KilledFiles(Files):
    """Dies at the `at`-th write (from 0), with the leading `done` of its bytes on disk; at the
    first sync if there are fewer writes."""

    def __init__(self, at: int, done: float) -> None:
        super().__init__(direct=False)
        self._at = at
        self._done = done
        self.num_writes = 0

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        if self.num_writes == self._at:
            (buffer,) = buffers
            super().pwritev(fd, [buffer[: int(self._done * len(buffer))]], offset)
            raise Killed
        self.num_writes += 1
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        raise Killed
