"""Times on the command line."""

import pytest

from kvtier.tools.errors import BadOption
from kvtier.tools.times import format_moment, parse_duration, parse_moment


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("1.5m", 90), (" 48h ", 172800), ("7d", 604800)]
)
def test_a_duration_is_read_as_its_unit_says(text: str, seconds: float) -> None:
    assert parse_duration(text, "--after") == seconds


@pytest.mark.parametrize("text", ["", "0s", "48", "-1h", "1 h", "2w", "1e3s", "9" * 400 + "d"])
def test_any_other_duration_names_the_option_and_the_cure(text: str) -> None:
    with pytest.raises(BadOption, match=r"^--after: .*write it as 90s"):
        parse_duration(text, "--after")


def test_a_moment_has_an_offset_and_is_to_come() -> None:
    assert parse_moment("2027-01-31T12:00+02:00", "--at", 0.0) == 1801389600.0
    for text in ("2027-01-31T12:00", "2027-01-31", "tomorrow", ""):
        with pytest.raises(BadOption, match=r"^--at: .*write it as 2027-01-31T12:00Z"):
            parse_moment(text, "--at", 0.0)
    with pytest.raises(BadOption, match="over already"):
        parse_moment("2027-01-31T12:00+02:00", "--at", 1801389600.0)


def test_a_moment_beyond_every_calendar_is_still_shown() -> None:
    assert format_moment(1801389600.0) == "2027-01-31 10:00:00+00:00"
    assert format_moment(2**63 / 1e6) == "after the year 9999"
