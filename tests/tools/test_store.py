"""`kvtier store`: what it lists, and that each order is carried out and does nothing else."""

import os
import shutil
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
    assert run("store", "pin", store, *named(6), "--label", "a", "--hours", "2").code == 0
    assert run("store", "pin", store, *named(2), "--label", "b").code == 0
    pins = run("store", "pins", store, "--json").summary["pins"]
    assert [(pin["label"], pin["prefix"]) for pin in pins] == sorted(
        ("b" if i == 2 else "a", TRUNK.keys[i].hex()) for i in (2, 4, 6)
    )
    assert [pin["expires_at"] is None for pin in pins].count(False) == 1
    assert run("store", "unpin", store, *named(2), "--label", "b").code == 0
    assert "2 pins lifted" in run("store", "unpin", store, "--label", "a").out
    assert run("store", "pins", store, "--json").summary["pins"] == []
    assert "no such pin" in run("store", "unpin", store, "--label", "a").complaint
    assert check_store(store).ok


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
