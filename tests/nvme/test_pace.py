"""When compressing pays, and what is measured to know it."""

import pytest

from kvtier.tiers.nvme.pace import Meter, Pace, Sample, pays, throughput

MIB = 1 << 20
GB = 1e9


@pytest.mark.parametrize(
    ("ratio", "drive", "decode", "wanted"),
    [
        (1.44, 0.5 * GB, 2 * GB, True),  # the drive is slow
        (1.44, 2.5 * GB, 1.8 * GB, False),  # decoding is slower than the drive
        (1.44, 2.5 * GB, 2.5 * GB, False),  # no faster
        (1.44, 2.5 * GB, 2.7 * GB, True),
        (1.04, 0.5 * GB, 99 * GB, False),  # not worth the work
        (1.0, 1.0, 99 * GB, False),
    ],
)
def test_compressing_pays_where_reading_less_beats_decoding(
    ratio: float, drive: float, decode: float, wanted: bool
) -> None:
    assert pays(ratio=ratio, drive_bytes_s=drive, decode_bytes_s=decode) is wanted


def test_throughput_counts_the_time_in_which_anything_was_under_way() -> None:
    apart = [(0.0, 1.0, 4 * MIB), (5.0, 6.0, 4 * MIB)]
    assert throughput(apart) == 4 * MIB
    together = [(0.5, 2.5, 4 * MIB), (0.0, 4.0, 4 * MIB), (1.0, 2.0, 8 * MIB), (4.0, 4.0, 0)]
    assert throughput(together) == 4 * MIB
    assert throughput([(0.0, 1.0, 4 * MIB - 1)]) is None
    assert throughput([(1.0, 1.0, 4 * MIB)]) is None
    assert throughput([]) is None


def read(seconds: float, *, decode_s: float | None = None) -> Pace:
    """A fetch of 8 MiB."""
    pace = Pace()
    pace.read(10.0, 10.0 + seconds, 8 * MIB)
    if decode_s is not None:
        pace.decoded(20.0, 20.0 + decode_s, 8 * MIB)
    return pace


def test_nothing_pays_before_drive_decoding_and_ratio_are_known() -> None:
    meter = Meter(2)
    assert not meter.pays(b"n")
    meter.learn(read(8.0))
    assert not meter.pays(b"n")
    meter.sampled(b"n", Sample(1.44, 50 * MIB))
    assert meter.pays(b"n") and not meter.pays(b"other")
    assert meter.knows(b"n") and not meter.knows(b"other")


def test_a_block_that_did_not_compress_says_nothing_about_decoding() -> None:
    meter = Meter(2)
    meter.learn(read(8.0))
    meter.sampled(b"n", Sample(1.0, 0.0))
    assert not meter.pays(b"n")
    assert meter.statistics().decode_bytes_s == 0


def test_real_decodes_replace_what_one_block_promised() -> None:
    meter = Meter(4)
    meter.learn(read(1.0))
    meter.sampled(b"n", Sample(1.44, 4 * MIB))
    assert meter.statistics().decode_bytes_s == 16 * MIB
    assert meter.pays(b"n")
    meter.learn(read(1.0, decode_s=4.0))
    assert meter.statistics().decode_bytes_s == 2 * MIB
    assert not meter.pays(b"n")
    meter.sampled(b"n", Sample(1.44, 999 * MIB))
    assert meter.statistics().decode_bytes_s == 2 * MIB


def test_a_fetch_that_decodes_says_nothing_about_the_drive() -> None:
    meter = Meter(1)
    meter.learn(read(8.0, decode_s=1.0))
    assert meter.statistics().drive_bytes_s == 0
    meter.learn(read(8.0))
    assert meter.statistics().drive_bytes_s == MIB


def test_measures_move_slowly_towards_what_is_seen() -> None:
    meter = Meter(1)
    for seconds in (8.0, 1.0):
        meter.learn(read(seconds))
    assert MIB < meter.statistics().drive_bytes_s < 3 * MIB
    for _ in range(60):
        meter.learn(read(1.0))
    assert meter.statistics().drive_bytes_s == pytest.approx(8 * MIB, rel=0.01)
    meter.sampled(b"n", Sample(1.44, 99 * MIB))
    for _ in range(60):
        meter.encoded(b"n", [8192, 8192], 8192)
    assert not meter.pays(b"n")


def test_as_many_namespaces_are_remembered_as_fit() -> None:
    meter = Meter(1)
    for number in range(300):
        meter.sampled(number.to_bytes(2, "big"), Sample(1.44, MIB))
    known = [meter.knows(number.to_bytes(2, "big")) for number in range(300)]
    assert known == [False] * 44 + [True] * 256


def test_published_blocks_are_counted_by_codec() -> None:
    meter = Meter(1)
    meter.published([5000, 3500, 3000], 5000)
    meter.published([5000], 5000)
    seen = meter.statistics()
    assert (seen.raw_blocks, seen.zstd_blocks) == (2, 2)
    assert (seen.decoded_bytes, seen.stored_bytes) == (20_000, 16_500)
