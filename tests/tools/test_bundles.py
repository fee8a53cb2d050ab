"""`kvtier export`, `import` and `bundle-info`: what they print, and what their exit codes say."""

from pathlib import Path

import pytest

from tests.nvme.bundles import ALL, OTHER, Tree, grown, held
from tests.nvme.rig import NAMESPACE, Rig, flip
from tests.tools.conftest import Run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    grown(tmp_path / "a")
    return tmp_path / "a"


def test_a_store_goes_to_another_host_by_a_file(run: Run, store: Path, tmp_path: Path) -> None:
    bundle, there = tmp_path / "b", tmp_path / "c"
    said = run("export", store, bundle, "--json")
    assert said.code == 0, said.err
    assert (said.summary["ok"], said.summary["blocks"]) == (True, 21)
    said = run("bundle-info", bundle, "--json")
    assert said.code == 0 and said.summary["complete"] is True
    assert [row["namespace"] for row in said.summary["namespaces"]] == [
        NAMESPACE.hex(),
        OTHER.hex(),
    ]
    said = run("import", bundle, there, "--nvme", "1MiB", "--json")
    assert said.code == 0 and (said.summary["ok"], said.summary["imported"]) == (True, 21)
    said = run("import", bundle, there, "--nvme", "1MiB", "--json")
    assert (said.code, said.summary["already_there"]) == (0, 21)
    assert run("check", there).code == 0
    with Rig(there) as rig:
        assert held(rig, Tree.make()) == ALL


def test_parts_are_chosen_by_namespace_and_by_prefix(run: Run, store: Path, tmp_path: Path) -> None:
    tree = Tree.make()
    prefixes = ["--prefix", tree.limb.keys[0].hex(), "--prefix", tree.alone.keys[4].hex()]
    said = run("export", store, tmp_path / "b", *prefixes, "--json")
    assert (said.code, said.summary["blocks"]) == (0, 2 + 1 + 5)
    again = ["import", tmp_path / "b", tmp_path / "pinned", "--nvme", "1MiB", "--pin", "gold"]
    assert run(*again, "--json").summary["pinned"] == 2
    said = run("export", tmp_path / "pinned", tmp_path / "gold", "--label", "gold", "--json")
    assert (said.code, said.summary["blocks"]) == (0, 2 + 1 + 5)
    said = run("export", store, tmp_path / "c", "--namespace", OTHER.hex(), "--json")
    assert (said.code, said.summary["blocks"]) == (0, 3)
    run("export", store, tmp_path / "d")
    arguments = [tmp_path / "d", tmp_path / "e", "--namespace", OTHER.hex(), "--nvme", "1MiB"]
    said = run("import", *arguments, "--json")
    assert said.code == 0 and said.summary["imported"] == 3
    assert said.summary["foreign"] == {NAMESPACE.hex(): 18}


def test_what_was_left_out_makes_the_exit_code_1(run: Run, store: Path, tmp_path: Path) -> None:
    said = run("export", store, tmp_path / "b", "--label", "gold", "--json")
    assert said.code == 1 and said.summary["missing"] == ["gold"]
    assert "no sound block matched label 'gold'" in said.out and not (tmp_path / "b").exists()
    run("export", store, tmp_path / "c")
    said = run("import", tmp_path / "c", tmp_path / "small", "--nvme", "40KiB", "--json")
    assert said.code == 1 and said.summary["refused"] + said.summary["imported"] == 21
    flip(tmp_path / "c", 3 * 4096)
    said = run("bundle-info", tmp_path / "c", "--json")
    assert said.code == 1 and said.summary["damaged"] > 0
    assert "fails its checksum" in said.out
    said = run("import", tmp_path / "c", tmp_path / "large", "--nvme", "1MiB", "--json")
    assert said.code == 1 and said.summary["damaged"] > 0


def test_mistakes_cost_nothing_and_are_one_line(run: Run, store: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    assert "--force" in run("export", store, tmp_path / "file").complaint
    assert run("export", store, tmp_path / "file", "--force").code == 0
    assert "is no bundle" in run("bundle-info", store / "owner").complaint
    assert "is no bundle" in run("import", store / "owner", tmp_path / "new").complaint
    assert not (tmp_path / "new").exists()
    assert "zstd, raw" in run("export", store, tmp_path / "x", "--codec", "lzma").complaint
    assert "64 hexadecimal" in run("export", store, tmp_path / "x", "--namespace", "ab").complaint
    assert "--prefix" in run("export", store, tmp_path / "x", "--prefix", "z" * 64).complaint
    said = run("import", tmp_path / "file", store, "--nvme", "40KiB")
    assert "--nvme" in said.complaint and "give some up" in said.complaint
    with Rig(store) as rig:
        assert held(rig, Tree.make()) == ALL
