"""Namespaces and block keys as people write them: 64 hexadecimal digits."""

from kvtier.index.words import KEY_BYTES
from kvtier.tools.errors import BadOption


def parse_digest(text: str, option: str) -> bytes:
    """The 32 bytes that `text` spells. Raises `BadOption` naming `option` for anything else."""
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != KEY_BYTES:
        raise BadOption(
            f"{option}: {text!r} is not {2 * KEY_BYTES} hexadecimal digits; "
            "`kvtier stats STORE --json` lists namespaces"
        )
    return digest
