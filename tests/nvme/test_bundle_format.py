"""BUNDLE.md's worked example, and the rules of a bundle's ends."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import kvtier.tiers.nvme.bundle as bundle
from kvtier.index.words import ROOT_KEY, block_keys
from kvtier.tiers.errors import BundleRefused, StoreVersion
from kvtier.tiers.nvme.bundle import (
    MAX_FOOTER_BYTES,
    Contents,
    Footer,
    NamespaceTotals,
    check_head,
    decode_footer,
    encode_footer,
    encode_head,
)
from kvtier.tiers.nvme.bundle_reader import Bundle, Record, verify_bundle
from kvtier.tiers.nvme.record import PAGE
from tests.nvme.rig import NAMESPACE, branch


def example() -> bytes:
    """The file spelt out in BUNDLE.md."""
    page = (Path(bundle.__file__).parent / "BUNDLE.md").read_text()
    block = re.search(r"```hex\n(.*?)```", page, re.DOTALL)
    assert block is not None
    body = bytearray(16384)
    for line in block[1].splitlines():
        offset, _, digits = line.partition("  ")
        row = bytes.fromhex(digits)
        body[int(offset, 16) : int(offset, 16) + len(row)] = row
    return bytes(body)


def test_the_worked_example_holds_what_the_page_says(tmp_path: Path) -> None:
    path = tmp_path / "b"
    path.write_bytes(example())
    report = verify_bundle(path)
    assert report.ok and report.complete
    assert (report.records, report.blocks, report.nbytes) == (1, 1, 10)
    assert report.namespaces == (NamespaceTotals(NAMESPACE, 1, 10),)
    tokens = branch(1, block_tokens=3).tokens + 1
    with Bundle(path) as opened:
        (record,) = opened.records()
        assert isinstance(record, Record)
        header = record.header
        assert (header.parent, header.generation, header.segment, header.page) == (
            ROOT_KEY,
            1,
            0,
            1,
        )
        assert header.tokens == tokens.astype("<i4").tobytes()
        assert header.blocks[0].key == block_keys(NAMESPACE, ROOT_KEY, tokens, 3)[0]


def test_the_worked_example_is_what_the_encoder_writes(tmp_path: Path) -> None:
    path, raw, contents = tmp_path / "b", example(), Contents()
    path.write_bytes(raw)
    with Bundle(path) as opened:
        for record in opened.records():
            assert isinstance(record, Record)
            contents.add(record.header, record.raw)
    assert encode_head() == raw[:PAGE]
    assert encode_footer(contents.footer(), 3) == raw[3 * PAGE :]


def test_a_flipped_bit_in_any_byte_of_a_head_is_refused() -> None:
    raw = bytearray(encode_head())
    for offset in range(PAGE):
        raw[offset] ^= 1 << offset % 8
        with pytest.raises((BundleRefused, StoreVersion)):
            check_head(bytes(raw), Path("b"))
        raw[offset] ^= 1 << offset % 8
    check_head(bytes(raw), Path("b"))


def test_a_flipped_bit_in_any_byte_of_a_footer_is_refused() -> None:
    footer = Footer(
        7, 2**64 - 1, (NamespaceTotals(b"a" * 32, 3, 9), NamespaceTotals(b"b" * 32, 1, 2))
    )
    raw = bytearray(encode_footer(footer, 5))
    assert decode_footer(bytes(raw), 5) == footer
    for offset in range(len(raw)):
        raw[offset] ^= 1 << offset % 8
        assert decode_footer(bytes(raw), 5) is None
        raw[offset] ^= 1 << offset % 8
    assert decode_footer(bytes(raw), 6) is None  # it stands elsewhere


@pytest.mark.parametrize("count", [0, 1, 84, 85, 1000])
def test_a_footer_survives_encoding_at_any_number_of_namespaces(count: int) -> None:
    rows = tuple(NamespaceTotals(n.to_bytes(32, "big"), n, 5 * n) for n in range(count))
    footer = Footer(count, 11, rows)
    raw = encode_footer(footer, 2)
    assert len(raw) % PAGE == 0 and decode_footer(raw, 2) == footer


def test_more_namespaces_than_a_footer_takes_are_refused() -> None:
    rows = (NamespaceTotals(b"n" * 32, 1, 1),) * (MAX_FOOTER_BYTES // 48 + 1)
    with pytest.raises(BundleRefused, match="in parts"):
        encode_footer(replace(Footer(1, 1, ()), namespaces=rows), 2)


@pytest.mark.parametrize(("at", "said"), [(8, "bundle format 3"), (12, "records of format 0")])
def test_another_format_version_is_named_and_refused(tmp_path: Path, at: int, said: str) -> None:
    raw = bytearray(example())
    raw[at] ^= 2
    (tmp_path / "b").write_bytes(raw)
    with pytest.raises(StoreVersion, match=f"{said}.*this kvtier reads 1 with 2"):
        verify_bundle(tmp_path / "b")


@pytest.mark.parametrize("content", [b"", b"KVBUNDLE", b"x" * 9000])
def test_a_file_that_is_no_bundle_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "b").write_bytes(content)
    with pytest.raises(BundleRefused, match="is no bundle; make one"):
        verify_bundle(tmp_path / "b")
    with pytest.raises(BundleRefused, match="cannot be read"):
        verify_bundle(tmp_path / "no such file")
