"""Sizes on the command line."""

import pytest

from kvtier.tools.errors import BadOption
from kvtier.tools.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4097", 4097),
        ("1B", 1),
        ("512MiB", 512 * 2**20),
        ("8GiB", 8 * 2**30),
        ("3G", 3 * 2**30),
        ("7KB", 7000),
        ("1.5GB", 1_500_000_000),
        (" 0.5 KiB ", 512),
        ("2TiB", 2 * 2**40),
    ],
)
def test_a_size_is_read_as_its_unit_says(text: str, nbytes: int) -> None:
    assert parse_size(text, "--nvme") == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "eight", "1 PiBs", "0", "0.1", "1e9", "8 gib", "\uff12MiB"]
)
def test_anything_else_names_the_option_and_the_cure(text: str) -> None:
    with pytest.raises(BadOption, match=r"^--nvme: .*write it like 8GiB"):
        parse_size(text, "--nvme")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 * 2**30, "3.0 GiB"),
        (5 * 2**40, "5.0 TiB"),
    ],
)
def test_a_size_is_shown_in_the_unit_that_fits(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text
