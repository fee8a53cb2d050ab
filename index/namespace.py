"""Identity: everything that must match before one run's KV may be read by another.

One function makes the digest, over typed, length-prefixed fields, so that no two different
identities can spell the same bytes. `tests/index/test_namespace.py` holds golden vectors.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import blake2b
from struct import pack

from kvtier.index.errors import KvtierError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class BlockLayout:
    """The shape of one block's bytes: `[layers, 2, kv_heads, block_size, head_dim]` of `dtype`.

    The same bytes stand in every tier. `dtype` is torch's name, e.g. "float32".
    """

    layers: int
    kv_heads: int
    block_size: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "block_size", "head_dim"):
            if getattr(self, name) < 1:
                raise KvtierError(f"layout.{name}: {getattr(self, name)} is not positive")
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise KvtierError(f"layout.dtype: {self.dtype!r} is unknown; use one of {known}")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.layers, 2, self.kv_heads, self.block_size, self.head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        elements = self.layers * 2 * self.kv_heads * self.block_size * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Namespace:
    """What a block's bytes depend on besides its tokens. Two runs share blocks only if all agree.

    `weights` and `config` are hex digests of the full content of the weights and of the model
    configuration; `rope` spells the rotary parameters; `lora` names adapter and revision; `salt`
    separates tenants. `exact` carries what exact mode adds (chunk size, kernel version, threads).
    """

    weights: str
    config: str
    layout: BlockLayout
    compute_dtype: str
    engine: str
    engine_version: str
    layout_id: str = "block-major-1"
    quantisation: str = "none"
    kv_scales: str = "none"
    first_layer: int = 0
    rope: str = ""
    lora: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    salt: str = ""
    exact: str = ""

    @cached_property
    def digest(self) -> bytes:
        """The 32 bytes that key every block of this namespace."""
        flat: list[tuple[str, int | str]] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, BlockLayout):
                flat += [(f"layout.{f.name}", getattr(value, f.name)) for f in fields(value)]
            else:
                flat.append((field.name, value))
        return digest_fields("kvtier-namespace-1", flat)


def digest_fields(domain: str, flat: "list[tuple[str, int | str]]") -> bytes:
    """32-byte BLAKE2b over `domain` and named fields, each typed and length-prefixed.

    A field is `u32 name length, name, type byte (i or s), u32 value length, value`, little-endian;
    integers are spelt in decimal ASCII, text in UTF-8.
    """
    state = blake2b(digest_size=32)
    for name, value in [("domain", domain), *flat]:
        label, text = name.encode(), str(value).encode()
        state.update(pack("<I", len(label)) + label)
        state.update((b"i" if isinstance(value, int) else b"s") + pack("<I", len(text)) + text)
    return state.digest()
