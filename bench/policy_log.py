"""Finished cells of the policy grid in a file, so that a run that was stopped loses nothing.

One JSON object a line. A cell counts again only for the same trace content, policy, capacity and
code: `code` is a digest of the sources that decide it. Knows nothing of how a cell is computed.
"""

import json
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from types import TracebackType

Cell = tuple[str, str, int]
"""Digest of the trace's requests, policy, capacity in blocks."""


def code_digest(sources: Iterable[Path]) -> str:
    """A digest of these files' names and contents."""
    digest = blake2b(digest_size=8)
    for path in sorted(sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


class CellLog:
    """Cells by trace, policy and capacity; kept in `path`, or only while it lives without one.

    What other code computed, and a line cut off by a kill, is passed over. Raises `ValueError` for
    a file with anything else in it, `OSError` if it cannot be read or written.
    """

    def __init__(self, path: Path | None, code: str) -> None:
        self._code = code
        self._hits: dict[Cell, int] = {}
        self._file = None
        if path is None:
            return
        told = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in told if line.endswith("\n")]
        for number, line in enumerate(whole, 1):
            try:
                row = json.loads(line)
                cell, code = (row["trace"], row["policy"], row["blocks"]), row["code"]
                hits = int(row["hits"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: is not a cell of the grid; name another file"
                ) from error
            if code == self._code:
                self._hits[cell] = hits
        self._file = path.open("w" if len(whole) < len(told) else "a")
        if len(whole) < len(told):
            self._file.writelines(whole)
            self._file.flush()

    def __enter__(self) -> "CellLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file:
            self._file.close()

    def __contains__(self, cell: Cell) -> bool:
        return cell in self._hits

    def __getitem__(self, cell: Cell) -> int:
        """Blocks hit. Raises `KeyError` for a cell that is not finished."""
        return self._hits[cell]

    def put(self, cell: Cell, hits: int) -> None:
        """A cell is finished; it is in the file when this returns."""
        self._hits[cell] = hits
        if self._file:
            trace, policy, blocks = cell
            row = {
                "trace": trace,
                "policy": policy,
                "blocks": blocks,
                "hits": hits,
                "code": self._code,
            }
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
