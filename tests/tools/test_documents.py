"""Finding and reading documents: order, lists, and what is refused before any work."""

import json
from pathlib import Path

import pytest

from kvtier.tools.documents import Document, find_documents
from kvtier.tools.errors import BadDocument


def test_a_directory_stands_for_its_text_files_in_order_of_name(tmp_path: Path) -> None:
    for name in ("b.md", "a.txt", "sub/c.txt", "ignored.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [d.read() for d in find_documents([tmp_path])] == ["a.txt", "b.md", "sub/c.txt"]


def test_rows_of_a_list_are_read_one_at_a_time_from_where_they_stand(tmp_path: Path) -> None:
    (tmp_path / "far.txt").write_text("far away")
    rows = [{"id": "é", "text": "erste Zeile, ü"}, {"id": 7, "text": "two"}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    lines += ["", json.dumps({"id": "third", "path": "far.txt"})]
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    documents = find_documents([tmp_path / "list.jsonl"])
    assert [d.id for d in documents] == ["é", "7", "third"]
    assert [d.read() for d in documents] == ["erste Zeile, ü", "two", "far away"]


def test_a_missing_file_is_named_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "here.txt").write_text("here")
    absent = [tmp_path / "gone.txt", tmp_path / "lost.jsonl"]
    with pytest.raises(BadDocument, match=r"gone\.txt: no such file \(and 1 more\)"):
        find_documents([tmp_path / "here.txt", *absent])


def test_a_list_that_points_at_a_missing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.jsonl").write_text('{"id": "a", "path": "gone.txt"}\n')
    with pytest.raises(BadDocument, match=r"gone\.txt: no such file"):
        find_documents([tmp_path / "list.jsonl"])


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", "want"),
        ('{"text": "no id"}', "want"),
        ('{"id": "x"}', "neither"),
        ('{"id": "x", "text": 3}', "neither"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "list.jsonl"
    path.write_text('{"id": "ok", "text": "fine"}\n' + line + "\n")
    with pytest.raises(BadDocument, match=f"line 2: .*{complaint}"):
        find_documents([path])


def test_one_id_for_two_documents_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.jsonl"
    path.write_text('{"id": "x", "text": "a"}\n{"id": "x", "text": "b"}\n')
    with pytest.raises(BadDocument, match="document x: named twice"):
        find_documents([path])


def test_nothing_to_do_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadDocument, match="no documents"):
        find_documents([tmp_path])


def test_an_unreadable_text_names_its_document(tmp_path: Path) -> None:
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xff")
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(BadDocument, match=r"document b: cannot be read"):
        Document("b", tmp_path / "bytes.txt").read()
    with pytest.raises(BadDocument, match=r"document b: is empty"):
        Document("b", tmp_path / "blank.txt").read()
