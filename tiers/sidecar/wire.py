"""The sidecar's control protocol as values: messages, their numbers and bounds, and framing.

`WIRE.md` is the definition; a test parses its worked example with this module. Knows no socket, no
cache and no slab. A frame is a 4-byte little-endian length and that many bytes of msgpack: an array
that begins with the message number and the request id. Block bytes never travel here.
"""

from enum import IntEnum
from struct import Struct
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from kvtier.index.namespace import BlockLayout
from kvtier.index.words import Slots, TierId, Tokens
from kvtier.tiers.contracts import Checksums

PROTOCOL_VERSION = 2
MAX_FRAME = 4 << 20
MAX_HELLO = 4096
MAX_TOKENS = 960 << 10
"""Tokens in one path: a full commit of them still fits in one frame."""
MAX_BLOCKS = 16384
"""Blocks in one reserve, commit, give-back or progress message."""
MAX_NAME = 128
MAX_TEXT = 1024
MAX_NUMBERS = 1024
NUMBER_OF_HELLO = 1
NO_LEASE = 0
"""Never a lease's number: releasing it does nothing but is answered, as a sign of life."""

_LENGTH = Struct("<I")

RequestId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Small = Annotated[int, Meta(ge=1, le=65536)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
TokenBytes = Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)]
SlotBytes = Annotated[bytes, Meta(max_length=4 * MAX_BLOCKS)]
ChecksumBytes = Annotated[bytes, Meta(max_length=8 * MAX_BLOCKS)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]


class WireError(Exception):
    """A frame that the protocol does not allow. Its sender's connection is closed."""


class Code(IntEnum):
    """Why a request was refused. The numbers are frozen."""

    VERSION = 1
    LAYOUT = 2
    FULL = 3
    BAD_REQUEST = 4
    BUSY = 5


class Message(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="number"
):
    """What every message begins with. A reply carries the id of the request it answers."""

    id: RequestId


class WireLayout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`BlockLayout` as it travels."""

    layers: Small
    kv_heads: Small
    block_size: Small
    head_dim: Small
    dtype: Name

    @classmethod
    def of(cls, layout: BlockLayout) -> "WireLayout":
        return cls(layout.layers, layout.kv_heads, layout.block_size, layout.head_dim, layout.dtype)

    def layout(self) -> BlockLayout:
        """Raises `KvtierError` for a dtype this version does not know."""
        return BlockLayout(self.layers, self.kv_heads, self.block_size, self.head_dim, self.dtype)


# ---- client to server ---------------------------------------------------------------------------


class Hello(Message, tag=NUMBER_OF_HELLO, frozen=True):
    """First frame of a connection. Without a layout the client may only ask for statistics."""

    version: Count
    layout: WireLayout | None
    client: Name


class Lookup(Message, tag=2, frozen=True):
    """How much of this path is there? `asks`: a request asks for it, and is heard of once."""

    namespace: Digest
    tokens: TokenBytes
    asks: bool


class Acquire(Message, tag=3, frozen=True):
    """Pin and bring up this path; the request's id names the lease. Answered by `Progress`."""

    namespace: Digest
    tokens: TokenBytes
    start_block: Count


class Release(Message, tag=4, frozen=True):
    lease: RequestId


class Reserve(Message, tag=5, frozen=True):
    """`count` slots to write into; the server may wait `wait_ms` for room."""

    count: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]
    wait_ms: Annotated[int, Meta(ge=0, le=60_000)]


class Commit(Message, tag=6, frozen=True):
    """Slots hold blocks `start_block…` of the path `tokens`, which ends with the last of them."""

    namespace: Digest
    tokens: TokenBytes
    start_block: Count
    slots: SlotBytes
    checksums: ChecksumBytes


class GiveBack(Message, tag=7, frozen=True):
    slots: SlotBytes


class Flush(Message, tag=8, frozen=True):
    namespace: Digest
    tokens: TokenBytes


class Stats(Message, tag=9, frozen=True):
    pass


# ---- server to client ---------------------------------------------------------------------------


class Welcome(Message, tag=64, frozen=True):
    """Answers `Hello`; the slab's descriptor rides on this frame unless no layout was named."""

    version: Count
    server: Name
    num_slots: Count
    block_bytes: Count
    stride: Count
    data_offset: Count


class Found(Message, tag=65, frozen=True):
    """Tokens of the path held in each tier: `dram` from the root, `nvme` behind them."""

    dram: Count
    nvme: Count


class Progress(Message, tag=66, frozen=True):
    """Blocks `first…` of an acquired path stand in `slots` and may be read until the release."""

    first: Count
    slots: SlotBytes
    sources: Annotated[bytes, Meta(max_length=MAX_BLOCKS)]
    done: bool


class Released(Message, tag=67, frozen=True):
    pass


class Reserved(Message, tag=68, frozen=True):
    slots: SlotBytes


class Committed(Message, tag=69, frozen=True):
    """How many of the given blocks, from the first, are resident now."""

    stored: Count


class Flushed(Message, tag=70, frozen=True):
    """How many blocks of the path, from the root, would survive a power cut."""

    blocks: Count


class NamespaceUse(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    namespace: Digest
    blocks: Annotated[int, Meta(ge=0)]
    nbytes: Annotated[int, Meta(ge=0)]


class Statistics(Message, tag=71, frozen=True):
    numbers: Annotated[dict[Name, int | float], Meta(max_length=MAX_NUMBERS)]
    namespaces: Annotated[tuple[NamespaceUse, ...], Meta(max_length=MAX_BLOCKS)]


class Refused(Message, tag=72, frozen=True):
    code: Code
    text: Text


Request = Hello | Lookup | Acquire | Release | Reserve | Commit | GiveBack | Flush | Stats
Reply = (
    Welcome | Found | Progress | Released | Reserved | Committed | Flushed | Statistics | Refused
)


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)

SOURCE_NUMBERS = {TierId.DRAM: 1, TierId.NVME: 2}
SOURCE_TIERS = {number: tier for tier, number in SOURCE_NUMBERS.items()}


def encode(message: Request | Reply) -> bytes:
    """One whole frame. Raises `WireError` if it would be longer than `MAX_FRAME`."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise WireError(f"a frame of {len(body)} bytes; the most is {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


def decode_request(body: bytes) -> Request:
    """Raises `WireError` on anything but one well-formed, bounded request."""
    try:
        return _requests.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a request: {error}") from error


def decode_reply(body: bytes) -> Reply:
    """Raises `WireError` on anything but one well-formed, bounded reply."""
    try:
        return _replies.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a reply: {error}") from error


def hello_version(body: bytes) -> tuple[int, int]:
    """`(request id, version)` of a hello of any protocol version.

    The first three elements of a hello never change their meaning, so that two versions can tell
    each other why they do not talk. Raises `WireError` if `body` is not a hello.
    """
    if len(body) > MAX_HELLO:
        raise WireError(f"a hello of {len(body)} bytes; the most is {MAX_HELLO}")
    try:
        head = msgspec.msgpack.decode(body, type=list)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"not a hello: {error}") from error
    if len(head) < 3 or head[0] != NUMBER_OF_HELLO or any(type(x) is not int for x in head[:3]):
        raise WireError("the first frame of a connection must be a hello")
    return head[1], head[2]


class FrameReader:
    """Cuts a byte stream into frame bodies."""

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self._buffer = bytearray()
        self.max_frame = max_frame

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies completed by `data`, in order. Raises `WireError` on an impossible length."""
        buffer = self._buffer
        buffer += data
        bodies: list[bytes] = []
        at = 0
        while len(buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, at)
            if not 0 < length <= self.max_frame:
                raise WireError(f"a frame of {length} bytes; allowed are 1 to {self.max_frame}")
            end = at + _LENGTH.size + length
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[at + _LENGTH.size : end]))
            at = end
        del buffer[:at]
        return bodies


# ---- arrays -------------------------------------------------------------------------------------


def ints_to_bytes(values: Tokens | Slots) -> bytes:
    """Token ids or slots, `int32[n]`, as little-endian bytes."""
    return values.astype("<i4", copy=False).tobytes()


def ints_from_bytes(data: bytes) -> "Slots | Tokens":
    """`int32[n]`. Raises `WireError` for a broken length or a negative value."""
    if len(data) % 4:
        raise WireError(f"{len(data)} bytes are no run of 32-bit integers")
    values = np.frombuffer(data, "<i4").astype(np.int32, copy=False)
    if len(values) and int(values.min()) < 0:
        raise WireError(f"a negative token or slot: {int(values.min())}")
    return values


def checksums_to_bytes(values: Checksums) -> bytes:
    """xxh3-64 of each block, `uint64[n]`, as little-endian bytes."""
    return values.astype("<u8", copy=False).tobytes()


def checksums_from_bytes(data: bytes) -> Checksums:
    """`uint64[n]`. Raises `WireError` for a broken length."""
    if len(data) % 8:
        raise WireError(f"{len(data)} bytes are no run of 64-bit checksums")
    return np.frombuffer(data, "<u8").astype(np.uint64, copy=False)
