"""Times as people write them: `90s`, `30m`, `48h`, `7d` from now, or a moment in ISO 8601."""

import re
from datetime import UTC, datetime

from kvtier.tools.errors import BadOption

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_S = 100 * 365 * 86400
_LATEST = datetime.max.replace(tzinfo=UTC).timestamp() - 1


def parse_duration(text: str, option: str) -> float:
    """Seconds of e.g. "48h". Raises `BadOption`, naming `option`, if it is no time to come."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text.strip())
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise BadOption(
            f"{option}: {text!r} is no duration of up to 100 years; write it as 90s, 30m, 48h or 7d"
        )
    return seconds


def parse_moment(text: str, option: str, now: float) -> float:
    """Unix seconds of e.g. "2027-01-31T12:00Z". Raises `BadOption`, naming `option`, if it says no
    offset from UTC or is not later than `now`."""
    try:
        moment = datetime.fromisoformat(text.strip())
        seconds = moment.timestamp() if moment.tzinfo is not None else None
    except (ValueError, OverflowError):
        seconds = None
    if seconds is None:
        raise BadOption(
            f"{option}: {text!r} is no moment with its offset; write it as 2027-01-31T12:00Z"
        )
    if seconds <= now:
        raise BadOption(f"{option}: {text!r} is over already; give a later moment")
    return seconds


def format_moment(seconds: float) -> str:
    """Unix seconds in ISO 8601, UTC."""
    if seconds > _LATEST:
        return "after the year 9999"
    return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds")
