"""`kvtier store` behind its options: opens a store, gives one order, says what came of it."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.index.words import BlockKey
from kvtier.tiers.contracts import Signal
from kvtier.tiers.nvme.recovery import is_store
from kvtier.tiers.nvme.tier import NvmeTier
from kvtier.tools.digests import parse_digest
from kvtier.tools.errors import BadOption
from kvtier.tools.inspection import ANY_CAPACITY
from kvtier.tools.listing import show_listing
from kvtier.tools.sizes import format_size
from kvtier.tools.times import format_moment, parse_duration, parse_moment

# Removing a large namespace may take its time; nobody waits behind a command line.
LONG_S = 3600.0


def list_namespaces(store: Path, *, as_json: bool) -> None:
    """Print every namespace, most bytes first."""
    with _opened(store, read_only=True) as tier:
        uses = sorted(tier.namespaces(), key=lambda use: -use.nbytes)
    rows = [
        (
            use.namespace.hex(),
            f"{use.blocks:,}",
            format_size(use.nbytes),
            format_size(use.pinned_bytes),
        )
        for use in uses
    ]
    show_listing(f"namespaces of {store}", ("namespace", "blocks", "bytes", "pinned"), rows)
    if as_json:
        named = [
            {
                "namespace": use.namespace.hex(),
                "blocks": use.blocks,
                "bytes": use.nbytes,
                "pinned_bytes": use.pinned_bytes,
            }
            for use in uses
        ]
        print(json.dumps({"namespaces": named}))


def list_pins(store: Path, *, as_json: bool) -> None:
    """Print every pin, by label."""
    with _opened(store, read_only=True) as tier:
        pins = sorted(tier.pins(), key=lambda pin: (pin.label, pin.namespace, pin.leaf))
    rows = [
        (
            pin.label,
            pin.namespace.hex(),
            pin.leaf.hex(),
            _date(pin.expires_at),
            format_size(pin.nbytes),
        )
        for pin in pins
    ]
    show_listing(f"pins of {store}", ("label", "namespace", "prefix", "until", "bytes"), rows)
    if as_json:
        named = [
            {
                "label": pin.label,
                "namespace": pin.namespace.hex(),
                "prefix": pin.leaf.hex(),
                "expires_at": pin.expires_at,
                "bytes": pin.nbytes,
            }
            for pin in pins
        ]
        print(json.dumps({"pins": named}))


def pin_prefix(
    store: Path, namespace: str, prefix: str, label: str, *, after: str | None, at: str | None
) -> None:
    """Pin a prefix; its quota is the disk's. Raises what `NvmeTier.pin` raises."""
    digest, key = parse_digest(namespace, "--namespace"), _key(prefix)
    until = _moment(("--expires-after", after), ("--expires-at", at))
    with _opened(store) as tier:
        tier.pin(digest, [key], label, until)
        pinned = tier.statistics().pinned_bytes
    print(f"pinned {label!r} until {_date(until)}; all pins hold {format_size(pinned)}")


def lift_pins(store: Path, label: str, namespace: str | None, prefix: str | None) -> None:
    """Lift one pin, or all of a label. Raises `BadOption` if half of one is named or none found."""
    if (namespace is None) != (prefix is None):
        raise BadOption("unpin: --namespace and --prefix go together; give both, or only --label")
    if namespace is None or prefix is None:
        with _opened(store) as tier:
            lifted = tier.unpin_label(label)
    else:
        digest, key = parse_digest(namespace, "--namespace"), _key(prefix)
        with _opened(store) as tier:
            lifted = int(tier.unpin(digest, [key], label))
    if not lifted:
        raise BadOption(f"unpin: no such pin {label!r}; `kvtier store pins {store}` lists them")
    print(f"{lifted} pins lifted")


def expire_branch(
    store: Path, namespace: str, prefix: str, *, after: str | None, at: str | None
) -> None:
    """Give a branch its end. Raises `BadOption` if it is not there, or no end is named."""
    digest, key = parse_digest(namespace, "--namespace"), _key(prefix)
    until = _moment(("--after", after), ("--at", at))
    if until is None:
        raise BadOption("expire: no time; give --after (48h) or --at (2027-01-31T12:00Z)")
    with _opened(store) as tier:
        found = tier.expire(digest, [key], until)
    if not found:
        raise BadOption(f"expire: block {prefix} is not in {store}; check namespace and key")
    print(f"expires at {format_moment(until)}, or earlier if that was said before")


def forget_branch(store: Path, namespace: str, prefix: str) -> None:
    """Remove a branch. Raises `BadOption` if it is not there."""
    digest, key = parse_digest(namespace, "--namespace"), _key(prefix)
    with _opened(store) as tier:
        before = tier.statistics().blocks
        found = tier.forget(digest, [key], deadline_s=LONG_S)
        gone = before - tier.statistics().blocks
    if not found:
        raise BadOption(f"forget: block {prefix} is not in {store}; check namespace and key")
    print(f"{gone:,} blocks removed")


def delete_namespace(store: Path, namespace: str) -> None:
    """Remove a namespace. Raises `BadOption` if it is not there."""
    digest = parse_digest(namespace, "--namespace")
    with _opened(store) as tier:
        gone = tier.delete_namespace(digest, deadline_s=LONG_S)
    if not gone:
        raise BadOption(
            f"delete: namespace {namespace} is not in {store}; "
            f"`kvtier store namespaces {store}` lists them"
        )
    print(f"{gone:,} blocks removed")


@contextmanager
def _opened(store: Path, *, read_only: bool = False) -> Iterator[NvmeTier]:
    """The store, which must be there; a command that looks at one makes none."""
    if not is_store(store):
        raise BadOption(f"{store}: there is no store here; check the path")
    tier = NvmeTier.open(store, capacity_bytes=ANY_CAPACITY, signal=Signal(), read_only=read_only)
    try:
        yield tier
    finally:
        tier.close()


def _key(text: str) -> BlockKey:
    return BlockKey(parse_digest(text, "--prefix"))


def _moment(after: tuple[str, str | None], at: tuple[str, str | None]) -> float | None:
    """When something ends, by at most one of two options, each its name and what was given."""
    now = time.time()
    if after[1] is not None and at[1] is not None:
        raise BadOption(f"{after[0]} and {at[0]}: two times; give one of them")
    if after[1] is not None:
        return now + parse_duration(after[1], after[0])
    return None if at[1] is None else parse_moment(at[1], at[0], now)


def _date(seconds: float | None) -> str:
    return "lifted" if seconds is None else format_moment(seconds)
