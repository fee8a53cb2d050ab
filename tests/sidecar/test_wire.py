"""The protocol: its page, its bounds, and that no bytes can make the decoder do anything else."""

import re
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.index.namespace import BlockLayout
from kvtier.tiers.sidecar import wire

LAYOUT = BlockLayout(layers=2, kv_heads=3, block_size=16, head_dim=8, dtype="float32")


def page_example(name: str) -> bytes:
    page = (files("kvtier.tiers.sidecar") / "WIRE.md").read_text()
    block = re.search(rf"```{name}\n(.*?)```", page, re.DOTALL)
    assert block is not None
    return bytes.fromhex("".join(line[:32] for line in block[1].splitlines()))


def test_the_pages_hello_is_what_a_client_sends() -> None:
    hello = wire.Hello(1, 2, wire.WireLayout.of(LAYOUT), "test")
    frame = page_example("hello")
    assert wire.encode(hello) == frame
    assert [wire.decode_request(body) for body in wire.FrameReader().feed(frame)] == [hello]
    assert hello.layout is not None and hello.layout.layout() == LAYOUT


def test_the_pages_progress_is_what_a_client_understands() -> None:
    (body,) = wire.FrameReader().feed(page_example("progress"))
    progress = wire.decode_reply(body)
    assert isinstance(progress, wire.Progress)
    assert (progress.id, progress.first, progress.done) == (7, 2, True)
    assert wire.ints_from_bytes(progress.slots).tolist() == [5, 6]
    assert [wire.SOURCE_TIERS[number].value for number in progress.sources] == ["dram", "nvme"]


def test_the_page_lists_every_message_by_its_number() -> None:
    page = (files("kvtier.tiers.sidecar") / "WIRE.md").read_text()
    listed = dict(re.findall(r"^\| (\d+) \| ([a-z]\w+) \|", page, re.MULTILINE))
    known = {
        str(message.__struct_config__.tag): re.sub(r"(?<!^)(?=[A-Z])", "_", message.__name__)
        for message in (*wire.Request.__args__, *wire.Reply.__args__)
    }
    assert listed == {number: name.lower() for number, name in known.items()}


digests = st.binary(min_size=32, max_size=32)
ids = st.integers(0, 2**63 - 1)
counts = st.integers(0, 2**31 - 1)
arrays = st.lists(counts, max_size=7).map(lambda values: np.array(values, np.int32))
requests = st.one_of(
    st.builds(wire.Lookup, ids, digests, arrays.map(wire.ints_to_bytes), st.booleans()),
    st.builds(wire.Acquire, ids, digests, arrays.map(wire.ints_to_bytes), counts),
    st.builds(wire.Reserve, ids, st.integers(1, wire.MAX_BLOCKS), st.integers(0, 60_000)),
    st.builds(wire.Release, ids, ids),
    st.builds(wire.Stats, ids),
)


@given(st.lists(requests, max_size=5), st.integers(1, 40))
def test_frames_arrive_whole_and_in_order_however_the_stream_is_cut(
    sent: list[wire.Request], piece: int
) -> None:
    stream = b"".join(wire.encode(request) for request in sent)
    reader = wire.FrameReader()
    bodies = [
        body
        for start in range(0, len(stream), piece)
        for body in reader.feed(stream[start : start + piece])
    ]
    assert [wire.decode_request(body) for body in bodies] == sent


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_or_a_wire_error_and_nothing_else(data: bytes) -> None:
    for decode in (wire.decode_request, wire.decode_reply, wire.hello_version):
        try:
            decoded: object = decode(data)
        except wire.WireError:
            continue
        assert decoded is not None


@pytest.mark.parametrize(
    "body",
    [
        b"\x93\x02\x01\x01",  # lookup without its fields
        b"\x93\x09\x01\x01",  # stats with one too many
        b"\x92\x7f\x01",  # no such number
        b"\x92\x09\xff",  # a negative id
        b"\x92\x09\x01\x00",  # something behind the message
        b"\x94\x05\x01\x00\x00",  # reserve of nothing
        b"\x92\x43\x01",  # a reply where a request belongs
        b"\x81\x09\x01",  # a map
        b"",
    ],
)
def test_a_request_that_breaks_a_rule_is_refused(body: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_request(body)


@pytest.mark.parametrize("length", [0, wire.MAX_FRAME + 1, 2**32 - 1])
def test_a_frame_of_impossible_length_is_refused_before_its_body_is_read(length: int) -> None:
    with pytest.raises(wire.WireError, match=str(length)):
        wire.FrameReader().feed(length.to_bytes(4, "little"))


def test_the_longest_path_fits_into_a_commit_and_a_longer_one_into_nothing() -> None:
    tokens = bytes(4 * wire.MAX_TOKENS)
    slots, checksums = bytes(4 * wire.MAX_BLOCKS), bytes(8 * wire.MAX_BLOCKS)
    frame = wire.encode(wire.Commit(2**63 - 1, bytes(32), tokens, 2**31 - 1, slots, checksums))
    assert wire.decode_request(frame[4:]).id == 2**63 - 1
    long = wire.encode(wire.Lookup(1, bytes(32), tokens + bytes(4), False))
    with pytest.raises(wire.WireError, match="length"):
        wire.decode_request(long[4:])


@pytest.mark.parametrize("data", [b"\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\0\0"])
def test_broken_or_negative_integers_are_refused(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.ints_from_bytes(data)


def test_arrays_keep_their_values() -> None:
    values = np.array([0, 1, 2**31 - 1], np.int32)
    assert np.array_equal(wire.ints_from_bytes(wire.ints_to_bytes(values)), values)
    sums = np.array([0, 2**64 - 1, 7], np.uint64)
    assert np.array_equal(wire.checksums_from_bytes(wire.checksums_to_bytes(sums)), sums)
