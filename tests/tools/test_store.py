"""`kvtier store`: what it lists, and that each order is carried out and does nothing else."""

import os
import shutil
import time
from datetime import datetime
from io import StringIO
from pathlib import Path

import pytest

from kvtier.tiers.contracts import Signal
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.tier import NvmeTier
from tests.nvme.rig import NAMESPACE, Rig, branch
from tests.tools.conftest import Run

OTHER = b"o" * 32
TRUNK = branch(7)
LIMB = branch(3, namespace=OTHER)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Seven blocks under one namespace, three under another."""
    with Rig(tmp_path / "s") as rig:
        rig.put(TRUNK)
        rig.put(LIMB, namespace=OTHER)
    return tmp_path / "s"


def named(index: int) -> list[str]:
    return ["--namespace", NAMESPACE.hex(), "--prefix", TRUNK.keys[index].hex()]


def test_namespaces_are_listed_with_what_they_hold(run: Run, store: Path) -> None:
    limb = ["--namespace", OTHER.hex(), "--prefix", LIMB.keys[1].hex()]
    run("store", "pin", store, *limb, "--label", "x")
    said = run("store", "namespaces", store, "--json")
    assert said.code == 0
    assert said.summary["namespaces"] == [
        {
            "namespace": NAMESPACE.hex(),
            "blocks": 7,
            "bytes": 3 * 4096 + 7 * 8192,
            "pinned_bytes": 0,
        },
        {
            "namespace": OTHER.hex(),
            "blocks": 3,
            "bytes": 4096 + 3 * 8192,
            "pinned_bytes": 4096 + 2 * 8192,
        },
    ]


def test_a_pin_is_listed_until_it_is_lifted(run: Run, store: Path) -> None:
    assert run("store", "pin", store, *named(4), "--label", "a").code == 0
    assert run("store", "pin", store, *named(6), "--label", "a", "--expires-after", "2h").code == 0
    assert run("store", "pin", store, *named(2), "--label", "b").code == 0
    pins = run("store", "pins", store, "--json").summary["pins"]
    assert [(pin["label"], pin["prefix"]) for pin in pins] == sorted(
        ("b" if i == 2 else "a", TRUNK.keys[i].hex()) for i in (2, 4, 6)
    )
    assert [pin["expires_at"] is None for pin in pins].count(False) == 1
    bytes_of = {pin["prefix"]: pin["bytes"] for pin in pins}
    assert bytes_of[TRUNK.keys[4].hex()] == 2 * 4096 + 5 * 8192
    assert run("store", "unpin", store, *named(2), "--label", "b").code == 0
    assert "2 pins lifted" in run("store", "unpin", store, "--label", "a").out
    assert run("store", "pins", store, "--json").summary["pins"] == []
    assert "no such pin" in run("store", "unpin", store, "--label", "a").complaint
    assert check_store(store).ok


def test_an_expiry_takes_what_follows_and_an_earlier_word_stands(run: Run, store: Path) -> None:
    assert run("store", "expire", store, *named(3), "--after", "36h").code == 0
    assert run("store", "expire", store, *named(3), "--at", "9999-01-31T12:00Z").code == 0
    strange = ["--namespace", NAMESPACE.hex(), "--prefix", LIMB.keys[0].hex()]
    assert "not in" in run("store", "expire", store, *strange, "--after", "1h").complaint
    now = [time.time() + 35 * 3600]
    with Rig(store, clock=lambda: now[0]) as rig:
        assert rig.lookup(TRUNK) == 7
        now[0] += 2 * 3600
        assert rig.lookup(TRUNK) == 3
    assert check_store(store).ok


def test_a_pin_ends_when_it_was_said_to(run: Run, store: Path) -> None:
    at = "2999-01-31T12:00+02:00"
    assert run("store", "pin", store, *named(2), "--label", "a", "--expires-at", at).code == 0
    (pin,) = run("store", "pins", store, "--json").summary["pins"]
    assert pin["expires_at"] == datetime.fromisoformat(at).timestamp()
    assert "2999-01-31 10:00:00+00:00" in run("store", "pins", store).out


@pytest.mark.parametrize("command", ["expire", "pin"])
def test_a_time_that_makes_no_sense_changes_nothing(run: Run, store: Path, command: str) -> None:
    options = ["--after", "--at"] if command == "expire" else ["--expires-after", "--expires-at"]
    order = ["store", command, store, *named(3), *(["--label", "a"] if command == "pin" else [])]
    both = run(*order, options[0], "1h", options[1], "2999-01-01T00:00Z")
    assert "give one of them" in both.complaint
    assert f"{options[0]}: '1 hour' is no" in run(*order, options[0], "1 hour").complaint
    assert f"{options[1]}: '2999-01-01' is no" in run(*order, options[1], "2999-01-01").complaint
    assert "over already" in run(*order, options[1], "2001-01-01T00:00Z").complaint
    if command == "expire":
        assert "give --after" in run(*order).complaint
    assert run("store", "pins", store, "--json").summary["pins"] == []
    with Rig(store, clock=lambda: time.time() + 1e10) as rig:
        assert rig.lookup(TRUNK) == 7


def test_forget_removes_what_follows_and_delete_a_namespace(run: Run, store: Path) -> None:
    assert "4 blocks removed" in run("store", "forget", store, *named(3)).out
    assert "not in" in run("store", "forget", store, *named(3)).complaint
    delete = ["store", "delete", store, "--namespace", OTHER.hex(), "--yes"]
    assert "3 blocks removed" in run(*delete).out
    assert "lists them" in run(*delete).complaint
    report = check_store(store)
    assert report.ok and report.blocks == 3


def test_a_deletion_that_is_not_confirmed_removes_nothing(
    run: Run, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO())
    assert run("store", "delete", store, "--namespace", OTHER.hex()).code == 1
    assert check_store(store).blocks == 10


@pytest.mark.parametrize("command", ["namespaces", "pins"])
def test_looking_makes_no_store(run: Run, tmp_path: Path, command: str) -> None:
    assert "no store here" in run("store", command, tmp_path / "none").complaint
    assert not (tmp_path / "none").exists()


def test_listings_show_whole_names_however_narrow_the_terminal(run: Run, store: Path) -> None:
    label = "l" * 64
    run("store", "pin", store, *named(6), "--label", label)
    assert NAMESPACE.hex() in run("store", "namespaces", store).out
    said = run("store", "pins", store).out
    assert label in said and NAMESPACE.hex() in said and TRUNK.keys[6].hex() in said


@pytest.mark.parametrize("command", [["store", "pins"], ["export"], ["import"]])
def test_a_store_without_its_catalogue_is_no_missing_store(
    run: Run, store: Path, tmp_path: Path, command: list[str]
) -> None:
    places = [store]
    if command != ["store", "pins"]:
        bundle = tmp_path / "a.bundle"
        places = [store, bundle] if command == ["export"] else [bundle, store]
    if command == ["import"]:
        assert run("export", store, bundle).code == 0
    shutil.rmtree(store / "catalog")
    said = run(*command, *places)
    assert said.code == 2 and "--rebuild-catalogue" in said.complaint


def test_a_store_in_use_is_said_so(run: Run, store: Path) -> None:
    owner = NvmeTier.open(store, capacity_bytes=1 << 26, signal=Signal())
    try:
        complaint = run("store", "pin", store, *named(1), "--label", "x").complaint
        assert f"PID {os.getpid()}" in complaint and "kvtier serve" in complaint
    finally:
        owner.close()


def test_half_a_name_lifts_nothing(run: Run, store: Path) -> None:
    run("store", "pin", store, *named(1), "--label", "x")
    said = run("store", "unpin", store, "--label", "x", "--namespace", NAMESPACE.hex())
    assert "go together" in said.complaint
    assert len(run("store", "pins", store, "--json").summary["pins"]) == 1
