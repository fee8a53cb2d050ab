"""Find and read the documents an operator names. Knows nothing of tokens or models.

A document is a text file, or a row of a JSON-lines file: `{"id": ..., "text": ...}`, or
`{"id": ..., "path": ...}` with the path relative to that file. A directory stands for the .txt and
.md files below it, in order of their names. Texts are read one at a time, when asked for.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.tools.errors import BadDocument

TEXT_SUFFIXES = (".txt", ".md")
LIST_SUFFIX = ".jsonl"


@dataclass(frozen=True)
class Document:
    """One text to be read later. `offset`: where its row starts in a JSON-lines file, else None."""

    id: str
    path: Path
    offset: int | None = None

    def read(self) -> str:
        """The text. Raises `BadDocument` if it is gone, empty, or not UTF-8."""
        try:
            if self.offset is None:
                text = self.path.read_bytes().decode()
            else:
                with self.path.open("rb") as file:
                    file.seek(self.offset)
                    text = json.loads(file.readline())["text"]
        except (OSError, UnicodeDecodeError, ValueError, KeyError) as error:
            raise BadDocument(
                f"document {self.id}: cannot be read ({error}); mend it or leave it out"
            ) from error
        if not text.strip():
            raise BadDocument(f"document {self.id}: is empty; leave it out")
        return str(text)


def find_documents(paths: Sequence[Path]) -> list[Document]:
    """All documents named by `paths`, in order, each id once.

    Everything named must be there before any work starts: raises `BadDocument` naming the first
    file that is missing, a list's bad row by its line, or an id that two documents share.
    """
    found = [document for path in paths for document in _expand(path)]
    if not found:
        raise BadDocument("no documents: name .txt or .md files, directories, or a .jsonl list")
    missing = [document for document in found if not document.path.is_file()]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise BadDocument(
            f"document {missing[0].path}: no such file{more}; correct the path or leave it out"
        )
    seen: set[str] = set()
    for document in found:
        if document.id in seen:
            raise BadDocument(f"document {document.id}: named twice; give each its own id")
        seen.add(document.id)
    return found


def _expand(path: Path) -> Iterator[Document]:
    if path.is_dir():
        inside = sorted(each for each in path.rglob("*") if each.suffix in TEXT_SUFFIXES)
        yield from (Document(str(each), each) for each in inside if each.is_file())
    elif path.suffix == LIST_SUFFIX and path.is_file():
        yield from _rows(path)
    else:
        yield Document(str(path), path)


def _rows(path: Path) -> Iterator[Document]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _row(path, number, offset, line)
            offset += len(line)


def _row(path: Path, number: int, offset: int, line: bytes) -> Document:
    where = f"{path}, line {number}"
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise BadDocument(f"{where}: not JSON ({error}); mend the row") from error
    if not isinstance(row, dict) or not isinstance(row.get("id"), str | int):
        raise BadDocument(f'{where}: want {{"id": …, "text": …}}; mend the row')
    if isinstance(row.get("text"), str):
        return Document(str(row["id"]), path, offset)
    if isinstance(row.get("path"), str):
        return Document(str(row["id"]), path.parent / row["path"])
    raise BadDocument(f'{where}: has neither "text" nor "path"; mend the row')
