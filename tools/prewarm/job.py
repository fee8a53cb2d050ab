"""The prewarming job: which documents are due, in what steps, and what came of them.

Resumable and idempotent because it keeps no state: the store itself is asked what it holds, and a
document is called done only when the store says that all of it is durable. Knows no model, tier or
terminal: they stand behind `Target` and `Watcher`.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from kvtier.index.errors import KvtierError
from kvtier.index.words import ROOT_KEY, BlockKey, Tokens, block_keys
from kvtier.tools.documents import Document
from kvtier.tools.errors import PrewarmIncomplete
from kvtier.tools.sizes import format_size

_ANY_NAMESPACE = bytes(32)  # keys only tell equal paths from different ones here


class Target(Protocol):
    """An engine over a store, as prewarming sees it. A block is `block_size` tokens."""

    @property
    def block_size(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def capacity_bytes(self) -> int | None:
        """The most the store may hold, where this process decides it."""
        ...

    @property
    def namespace(self) -> bytes:
        """The digest that the store keeps its blocks under."""
        ...

    def prefix(self, text: str) -> Tokens:
        """The whole blocks of tokens that every prompt about `text` starts with."""
        ...

    def held(self, tokens: Tokens) -> int:
        """How many leading blocks of `tokens` are durable now."""
        ...

    def prefill(self, tokens: Tokens) -> int:
        """Have the KV of all `tokens` in memory; return how many had to be computed."""
        ...

    def flush(self, tokens: Tokens) -> int:
        """Make them durable; return how many leading blocks now are."""
        ...


class Watcher(Protocol):
    """Told how the work goes. Tokens counted are those still to be computed when it was planned."""

    def started(self, documents: int) -> None: ...
    def planned(self, tokens: int) -> None: ...
    def advanced(self, tokens: int) -> None: ...
    def finished(self, document: Document, outcome: str) -> None: ...


@dataclass(frozen=True)
class StoredPrefix:
    """A document that is in the store whole: what pins, exports and deletions name it by."""

    document: str
    namespace: bytes
    leaf: BlockKey
    blocks: int


@dataclass(frozen=True)
class Summary:
    """What a run did. `tokens_skipped` were stored before; `bytes_written` counts KV bytes.

    `stored` has every document that was found whole in the store, whoever put it there.
    """

    documents: int = 0
    computed: int = 0
    already_there: int = 0
    too_short: int = 0
    failed: int = 0
    not_started: int = 0
    tokens_computed: int = 0
    tokens_skipped: int = 0
    blocks_written: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    tokens_per_s: float = 0.0
    problems: tuple[str, ...] = ()
    stored: tuple[StoredPrefix, ...] = ()

    def as_json(self) -> dict[str, object]:
        stored = [
            {
                "document": each.document,
                "namespace": each.namespace.hex(),
                "prefix": each.leaf.hex(),
                "blocks": each.blocks,
            }
            for each in self.stored
        ]
        return asdict(self) | {"stored": stored}


class StoreRefused(PrewarmIncomplete):
    """The store did not take a document whole: going on would compute what cannot be kept."""


@dataclass
class _Item:
    document: Document
    tokens: Tokens
    held: int


@dataclass
class PrewarmJob:
    """Brings documents into `target`'s store, `step_tokens` at a time: a kill loses little."""

    target: Target
    watcher: Watcher
    step_tokens: int = 2048
    clock: Callable[[], float] = time.perf_counter
    _counts: dict[str, int] = field(default_factory=dict)
    _problems: list[str] = field(default_factory=list)
    _failed: set[str] = field(default_factory=set)
    _whole: set[str] = field(default_factory=set)

    def run(self, documents: Sequence[Document]) -> Summary:
        """Store every document; return what was done. Problems are in the summary, not raised.

        A document that cannot be read or computed fails alone; a store that takes no more ends the
        run. Raises `PrewarmIncomplete` before any work if the store cannot hold what is asked.
        """
        started = self.clock()
        self._counts, self._problems = {}, []
        self._failed, self._whole = set(), set()
        self.watcher.started(len(documents))
        items = self._plan(documents)
        refuse_too_much([item.tokens for item in items], self.target)
        size = self.target.block_size
        self.watcher.planned(sum(len(item.tokens) - item.held * size for item in items))
        for position, item in enumerate(items):
            try:
                self._bring(item)
            except StoreRefused as error:
                self._fail(item.document, error)
                self._count("not_started", len(items) - position - 1)
                break
            except KvtierError as error:
                self._fail(item.document, error)
        else:
            self._recount(items)
        stored = tuple(self._prefix(item) for item in items if item.document.id in self._whole)
        seconds = self.clock() - started
        computed = self._counts.get("tokens_computed", 0)
        return Summary(
            documents=len(documents),
            bytes_written=self._counts.get("blocks_written", 0) * self.target.block_bytes,
            seconds=round(seconds, 3),
            tokens_per_s=round(computed / seconds, 1) if seconds > 0 else 0.0,
            problems=tuple(self._problems),
            stored=stored,
            **self._counts,
        )

    def _plan(self, documents: Sequence[Document]) -> list[_Item]:
        """Tokenise everything and ask the store, so that the total is known before computing."""
        items = []
        for document in documents:
            try:
                tokens = self.target.prefix(document.read())
                if len(tokens):
                    items.append(_Item(document, tokens, self.target.held(tokens)))
                else:
                    self._count("too_short", 1)
                    self.watcher.finished(document, "shorter than one block: nothing to store")
            except KvtierError as error:
                self._fail(document, error)
        return items

    def _bring(self, item: _Item) -> None:
        size = self.target.block_size
        step = max(self.step_tokens // size, 1) * size
        done = held = self.target.held(item.tokens) * size  # an earlier one may share its start
        self.watcher.advanced(max(done - item.held * size, 0))
        computed = 0
        for end in [*range(step, len(item.tokens), step), len(item.tokens)]:
            if end <= done:
                continue
            fresh = self.target.prefill(item.tokens[:end])
            stored = self.target.flush(item.tokens[:end])
            computed += fresh
            self._count("tokens_computed", fresh)
            self._count("blocks_written", max(stored - done // size, 0))
            if stored < end // size:
                raise StoreRefused(
                    f"the store took {stored} of {len(item.tokens) // size} blocks; "
                    "free disk space or raise --nvme, then run again to resume"
                )
            self.watcher.advanced(end - done)
            done = end
        self._whole.add(item.document.id)
        self._count("tokens_skipped", len(item.tokens) - computed)
        if held == len(item.tokens):
            self._count("already_there", 1)
            self.watcher.finished(item.document, "already there")
        else:
            self._count("computed", 1)
            self.watcher.finished(item.document, f"{computed} tokens computed")

    def _recount(self, items: Sequence[_Item]) -> None:
        """A store near its capacity may have given up early documents for late ones: look again."""
        size = self.target.block_size
        for item in items:
            kept = self.target.held(item.tokens) == len(item.tokens) // size
            if not kept and item.document.id not in self._failed:
                self._fail(
                    item.document,
                    PrewarmIncomplete("evicted again by later documents; raise --nvme"),
                )

    def _prefix(self, item: _Item) -> StoredPrefix:
        namespace = self.target.namespace
        keys = block_keys(namespace, ROOT_KEY, item.tokens, self.target.block_size)
        return StoredPrefix(item.document.id, namespace, keys[-1], len(keys))

    def _count(self, name: str, n: int) -> None:
        self._counts[name] = self._counts.get(name, 0) + n

    def _fail(self, document: Document, error: KvtierError) -> None:
        self._count("failed", 1)
        self._failed.add(document.id)
        self._whole.discard(document.id)
        self._problems.append(f"{document.id}: {error}")
        self.watcher.finished(document, f"failed: {error}")


class Bounded(Protocol):
    """What the room that documents take is reckoned from."""

    @property
    def block_size(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def capacity_bytes(self) -> int | None: ...


def refuse_too_much(prefixes: Iterable[Tokens], store: Bounded) -> None:
    """Later documents would push earlier ones out: say so before anything is touched.

    Raises `PrewarmIncomplete` if the distinct blocks of `prefixes` are more than `store` may hold.
    """
    keys = {
        key
        for tokens in prefixes
        for key in block_keys(_ANY_NAMESPACE, ROOT_KEY, tokens, store.block_size)
    }
    needed = len(keys) * store.block_bytes
    if store.capacity_bytes is not None and needed > store.capacity_bytes:
        raise PrewarmIncomplete(
            f"store capacity {format_size(store.capacity_bytes)} is less than the "
            f"{format_size(needed)} that these documents take; raise --nvme or name fewer documents"
        )
