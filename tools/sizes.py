"""Sizes as people write them ("8GiB") and as programs count them (bytes)."""

import re
from decimal import Decimal

from kvtier.tools.errors import BadOption

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40} | {
    name + suffix: base ** (power + 1)
    for power, name in enumerate("KMGT")
    for suffix, base in (("iB", 2**10), ("B", 10**3))
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str, option: str) -> int:
    """Bytes in `text`: "512MiB" (powers of 1024; "512M" too), "8GB" (powers of 1000) or "4096".

    Raises `BadOption` naming `option` for anything else, and for less than one byte.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in _UNITS:
        raise BadOption(f"{option}: {text!r} is not a size; write it like 8GiB or 512MiB")
    size = int(Decimal(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise BadOption(f"{option}: {text!r} is no room at all; write it like 8GiB or 512MiB")
    return size


def format_size(nbytes: float) -> str:
    """`nbytes` in the largest binary unit that leaves at least one before the point."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
