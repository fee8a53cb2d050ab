"""kill -9 in the middle of a prewarm: the store is whole, and no finished document is redone."""

import itertools
import json
import os
import signal
import subprocess
from pathlib import Path

from tests.tools.conftest import SMALL, Run, command

DOCUMENTS = 16


def test_a_killed_prewarm_leaves_a_whole_store_and_goes_on_where_it_stopped(
    run: Run, tiny: Path, tmp_path: Path
) -> None:
    text = "says much the same as the others. " * 6
    rows = [{"id": str(n), "text": f"document {n} {text}"} for n in range(DOCUMENTS)]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    store = tmp_path / "store"
    arguments = ["prewarm", tmp_path / "list.jsonl", "--model", tiny, "--store", store, *SMALL]
    process = subprocess.Popen(
        command(*arguments, "--step", "64"), stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stderr is not None
        done = list(itertools.islice(process.stderr, 3))
        os.kill(process.pid, signal.SIGKILL)
        done += [line for line in process.stderr if line.endswith("computed\n")]
    assert process.returncode == -signal.SIGKILL
    assert 3 <= len(done) < DOCUMENTS

    assert run("check", store).code == 0
    again = run(*arguments, "--json").summary
    assert again["already_there"] >= len(done)
    assert again["computed"] + again["already_there"] == DOCUMENTS
    assert again["blocks_written"] < DOCUMENTS * 20
    assert run("check", store).code == 0
    assert run(*arguments, "--json").summary["computed"] == 0
