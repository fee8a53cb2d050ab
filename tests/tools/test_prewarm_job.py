"""The job against a store that is a set: what is due, what a refusal costs, what is summed up."""

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvtier.index.errors import KvtierError
from kvtier.index.words import ROOT_KEY, Tokens, as_tokens, block_keys
from kvtier.tools.documents import Document
from kvtier.tools.errors import PrewarmIncomplete
from kvtier.tools.prewarm.job import PrewarmJob, Summary

NAMESPACE = bytes(range(32))


@dataclass
class SetTarget:
    """Tokens are the text's bytes; the store keeps at most `room` blocks and then refuses."""

    block_size: int = 3
    block_bytes: int = 100
    capacity_bytes: int | None = None
    namespace: bytes = NAMESPACE
    room: int = 10**9
    stored: set[bytes] = field(default_factory=set)
    prefilled: list[int] = field(default_factory=list)
    forbidden: str = "\0"

    def prefix(self, text: str) -> Tokens:
        if self.forbidden in text:
            raise KvtierError("prompt: longer than the model allows; shorten it")
        tokens = as_tokens(np.frombuffer(text.encode(), np.uint8))
        return tokens[: len(tokens) - len(tokens) % self.block_size]

    def _keys(self, tokens: Tokens) -> list[bytes]:
        return list(block_keys(NAMESPACE, ROOT_KEY, tokens, self.block_size))

    def held(self, tokens: Tokens) -> int:
        return len(list(itertools.takewhile(self.stored.__contains__, self._keys(tokens))))

    def prefill(self, tokens: Tokens) -> int:
        fresh = len(tokens) - self.held(tokens) * self.block_size
        self.prefilled.append(fresh)
        return fresh

    def flush(self, tokens: Tokens) -> int:
        for key in self._keys(tokens):
            if key not in self.stored and len(self.stored) >= self.room:
                break
            self.stored.add(key)
        return self.held(tokens)


class Recorder:
    def __init__(self) -> None:
        self.total = 0
        self.tokens = 0
        self.outcomes: list[str] = []

    def started(self, documents: int) -> None:
        self.documents = documents

    def planned(self, tokens: int) -> None:
        self.total = tokens

    def advanced(self, tokens: int) -> None:
        self.tokens += tokens

    def finished(self, document: Document, outcome: str) -> None:
        self.outcomes.append(f"{document.id}: {outcome}")


def write(directory: Path, *texts: str) -> list[Document]:
    documents = []
    for number, text in enumerate(texts):
        path = directory / f"{number}.txt"
        path.write_text(text)
        documents.append(Document(str(number), path))
    return documents


def run(target: SetTarget, documents: list[Document], step: int = 7) -> tuple[Summary, Recorder]:
    watcher = Recorder()
    return PrewarmJob(target, watcher, step_tokens=step).run(documents), watcher


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
def test_every_whole_block_is_stored_and_counted_once(tmp_path: Path, step: int) -> None:
    target = SetTarget()
    summary, watcher = run(target, write(tmp_path, "abcdefghij", "xyzxyz"), step)
    assert (summary.computed, summary.already_there, summary.failed) == (2, 0, 0)
    assert (summary.tokens_computed, summary.tokens_skipped) == (15, 0)
    assert (summary.blocks_written, summary.bytes_written) == (5, 500)
    assert len(target.stored) == 5
    assert watcher.tokens == watcher.total == 15
    assert [(each.document, each.blocks) for each in summary.stored] == [("0", 3), ("1", 2)]
    assert {each.leaf for each in summary.stored} < target.stored


def test_a_finished_document_is_never_computed_again(tmp_path: Path) -> None:
    target = SetTarget()
    documents = write(tmp_path, "abcdefghij", "xyzxyz")
    run(target, documents)
    target.prefilled.clear()
    summary, _ = run(target, documents)
    assert target.prefilled == []
    assert (summary.computed, summary.already_there) == (0, 2)
    assert (summary.tokens_computed, summary.tokens_skipped) == (0, 15)
    assert summary.blocks_written == 0


def test_an_interrupted_document_goes_on_where_the_store_ends(tmp_path: Path) -> None:
    target = SetTarget(room=2)
    documents = write(tmp_path, "abcdefghijkl")
    first, _ = run(target, documents, step=3)
    assert first.failed == 1 and first.blocks_written == 2
    target.room = 10
    second, _ = run(target, documents, step=3)
    assert (second.computed, second.tokens_computed, second.tokens_skipped) == (1, 6, 6)
    assert second.blocks_written == 2


def test_a_shared_beginning_is_computed_once(tmp_path: Path) -> None:
    summary, _ = run(SetTarget(), write(tmp_path, "abcdefxyz", "abcdefghi"))
    assert (summary.tokens_computed, summary.tokens_skipped) == (12, 6)
    assert summary.blocks_written == 4


def test_a_store_that_refuses_ends_the_run_and_keeps_what_it_has(tmp_path: Path) -> None:
    target = SetTarget(room=3)
    summary, watcher = run(target, write(tmp_path, "abcdef", "uvwxyz", "mnopqr"))
    assert (summary.computed, summary.failed, summary.not_started) == (1, 1, 1)
    assert len(target.stored) == 3
    assert "took 1 of 2 blocks" in summary.problems[0]
    assert [each.document for each in summary.stored] == ["0"]
    assert len(watcher.outcomes) == 2


def test_one_bad_document_does_not_stop_the_others(tmp_path: Path) -> None:
    documents = write(tmp_path, "abc", "bad !", "   ", "xyzxyz", "z")
    documents[0].path.write_bytes(b"\xff\xfe\xff")
    summary, watcher = run(SetTarget(forbidden="!"), documents)
    assert (summary.computed, summary.failed, summary.too_short) == (1, 3, 1)
    assert [problem[0] for problem in summary.problems] == ["0", "1", "2"]
    assert len(watcher.outcomes) == watcher.documents == 5


def test_more_than_the_store_can_ever_hold_is_refused_before_any_work(tmp_path: Path) -> None:
    target = SetTarget(capacity_bytes=399)
    with pytest.raises(PrewarmIncomplete, match=r"399 B.*400 B.*--nvme"):
        run(target, write(tmp_path, "abcdef", "abcxyzuvw"))
    assert target.prefilled == [] and target.stored == set()


def test_a_document_evicted_by_later_ones_is_reported(tmp_path: Path) -> None:
    class Forgetful(SetTarget):
        def flush(self, tokens: Tokens) -> int:
            stored = super().flush(tokens)
            if len(self.stored) > 2:
                self.stored -= set(self._keys(self.prefix("abcdef")))
            return stored

    summary, _ = run(Forgetful(), write(tmp_path, "abcdef", "uvwxyz"))
    assert (summary.computed, summary.failed) == (2, 1)
    assert "evicted again" in summary.problems[0]
    assert [each.document for each in summary.stored] == ["1"]
