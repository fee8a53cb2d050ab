"""Everything a store can be asked, in random order, reopened each time as another owner might.

Whatever came before: no byte is wrong, what is served is what was put and not taken back, pins
hold, the disk never takes more than the capacity, and in the end the store checks clean.
"""

import random
from pathlib import Path

import pytest

from kvtier.tiers.errors import PinRefused
from kvtier.tiers.nvme.bundle_export import export_bundle
from kvtier.tiers.nvme.bundle_import import import_bundle
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.repair import rebuild_store, repair_store
from kvtier.tiers.nvme.settings import Geometry
from tests.nvme.rig import Branch, Rig, branch, disk_takes, num_landed
from tests.prf import mixed_bytes

SPACES = (bytes([1]) * 32, bytes([2]) * 32)
SIZES = (1, 4096, 5000, 45056)


class MeteredFiles(Files):
    """Notes whether the segments ever take more than the capacity."""

    def __init__(self, store: Path, capacity: int, *, direct: bool) -> None:
        super().__init__(direct=direct)
        self._store = store
        self._capacity = capacity
        self.ample = True

    def allocate(self, fd: int, offset: int, length: int) -> None:
        super().allocate(fd, offset, length)
        self.ample &= disk_takes(self._store, at_most=self._capacity)


class Script:
    """One store's random life."""

    def __init__(self, path: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.store = path / "s"
        self.bundle = path / "bundle"
        self.block_bytes = self.chance.choice(SIZES)
        self.now = 1000.0
        self.pins: dict[tuple[bytes, str], Branch] = {}

    def live(self, lives: int, steps: int) -> None:
        """So many openings with so many requests each."""
        for _ in range(lives):
            self._between()
            self._open()
            with self.rig:
                for _ in range(steps):
                    self._step()
                    self._look()
            used = self.rig.tier.statistics().used_bytes
            report = check_store(self.store)
            assert report.ok, report.problems
            assert (report.bytes, report.leftover_bytes) == (used, 0)

    def _open(self) -> None:
        chance = self.chance
        room = 4096 + -(-self.block_bytes // 4096) * 4096
        capacity = room * chance.choice((2, 7, 40)) + chance.choice((0, 4095))
        self.files = MeteredFiles(self.store, capacity, direct=chance.random() < 0.5)
        self.rig = Rig(
            self.store,
            block_bytes=self.block_bytes,
            capacity_bytes=capacity,
            files=self.files,
            fill=mixed_bytes,
            clock=lambda: self.now,
            io_threads=chance.choice((1, 4)),
            codec=chance.choice(("raw", "zstd", "auto")),
            element_bytes=chance.choice((1, 2, 4)),
            geometry=Geometry(
                chance.choice((1, 24576, 4 << 20)),
                chance.choice((1, 64 << 10)),
                chance.choice((1, 128 << 10, 1 << 30)),
            ),
        )
        there = {(pin.namespace, pin.label) for pin in self.rig.tier.pins()}
        self.pins = {name: held for name, held in self.pins.items() if name in there}

    def _between(self) -> None:
        """What is done to a closed store."""
        what = self.chance.choice(("nothing", "nothing", "repair", "rebuild", "lost", "export"))
        if not self.store.exists() or what == "nothing":
            return
        if what == "export":
            report = export_bundle(self.store, self.bundle, force=True, clock=lambda: self.now)
            assert report.ok, report.problems
        elif what == "repair":
            assert repair_store(self.store).found == ()
        else:
            self.pins.clear()
            if what == "rebuild":
                assert rebuild_store(self.store).after.ok
            else:
                (self.store / "catalog" / "data.mdb").unlink()

    def _step(self) -> None:
        chance, tier = self.chance, self.rig.tier
        space = chance.choice(SPACES)
        trunk = branch(20, chance.randrange(4), namespace=space)
        path = trunk.part(0, chance.randrange(1, 21))
        what = chance.choice(
            ("put", "put", "put", "fetch", "fetch", "pin", "unpin", "take", "pass")
        )
        if what == "put":
            twig = branch(4, chance.randrange(10, 20), parent=path.keys[-1], namespace=space)
            self.rig.put(path, namespace=space, background=chance.random() < 0.2)
            self.rig.put(twig, namespace=space)
        elif what == "fetch":
            held = tier.holds(space, path.keys)
            assert num_landed(self.rig.fetch(path, namespace=space)) == held
        elif what == "pin" and (held := tier.holds(space, path.keys)):
            label = chance.choice("ab")
            if (space, label) not in self.pins:
                self._pin(space, path.part(0, held), label)
        elif what == "unpin" and self.pins:
            name = chance.choice(sorted(self.pins))
            assert tier.unpin(name[0], self.pins.pop(name).keys, name[1])
        elif what == "take":
            self._take(space, path)
        elif what == "pass":
            self.now += chance.choice((1.0, 100.0, 86400.0))
            if self.bundle.exists():
                report = import_bundle(self.bundle, tier)
                assert report.complete and not report.damaged, report.problems

    def _pin(self, space: bytes, path: Branch, label: str) -> None:
        try:
            self.rig.tier.pin(space, path.keys, label)
        except PinRefused:
            return
        self.pins[space, label] = path

    def _take(self, space: bytes, path: Branch) -> None:
        """Remove blocks; pins go with them."""
        tier, start = self.rig.tier, self.chance.randrange(len(path.keys))
        self.pins = {name: held for name, held in self.pins.items() if name[0] != space}
        for pin in tier.pins():
            if pin.namespace == space:
                tier.unpin(space, [pin.leaf], pin.label)
        how = self.chance.randrange(8)
        if how == 0:
            tier.delete_namespace(space)
            start = 0
        elif how < 4:
            tier.expire(space, path.keys[start:], self.now)
        else:
            tier.forget(space, path.keys[start:])
        assert tier.holds(space, path.keys) <= start

    def _look(self) -> None:
        assert self.files.ample, "the disk took more than the capacity"
        for (space, _), path in self.pins.items():
            assert self.rig.tier.holds(space, path.keys) == len(path.keys), "a pin did not hold"


@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_store_is_asked_it_keeps_its_promises(tmp_path: Path, seed: int) -> None:
    Script(tmp_path, seed).live(lives=4, steps=8)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(100, 150))
def test_over_many_lives_a_store_keeps_its_promises(tmp_path: Path, seed: int) -> None:
    Script(tmp_path, seed).live(lives=12, steps=25)
