"""What the storage service may tell a caller. Each message names the thing and the cure."""

from kvtier.index.errors import KvtierError


class TierFull(KvtierError):
    """No room, now and within the deadline; nothing was changed. Retry, or do without."""


class CapacityTooSmall(KvtierError):
    """A tier was given less room than one block takes."""


class BudgetSpent(KvtierError):
    """A write that nobody waits for would exceed the day's write budget. Try again tomorrow."""


class StoreInUse(KvtierError):
    """Another process owns the store directory."""


class StoreVersion(KvtierError):
    """The store, or a bundle, was written in a format this version does not read."""


class StoreCorrupt(KvtierError):
    """The store's catalogue or a record contradicts itself. Never raised for one bad block on
    the request path: that is a miss, counted and quarantined."""


class BundleRefused(KvtierError):
    """A file is no bundle, cannot be read or written, or stands where it may not be replaced."""


class StoreOut(KvtierError):
    """The store's drive is sick and left alone for now. Do without it; it comes back by itself."""


class PinRefused(KvtierError):
    """A pin names a block that is not there, or would exceed the quota; nothing was changed."""


class StoreBusy(KvtierError):
    """The store did not finish within the deadline. What was asked goes on all the same."""


class StoreUnsupported(KvtierError):
    """The file system cannot do what the store needs (hole punching, or any writing at all)."""


class CodecUnknown(KvtierError):
    """A store was asked for a codec, or for a size of elements, that it does not have."""


class SidecarUnavailable(KvtierError):
    """No sidecar answers at the socket, or it refused the hello."""


class CalledOff(KvtierError):
    """A copy that nobody wanted any more, or that came too late, was not begun. Ask again."""


class LaunchRefused(Exception):
    """A kernel launch named a slot it may not read. A bug in the caller, so not a `KvtierError`."""


class RecordRefused(StoreCorrupt):
    """A record's header is damaged, or describes something else than what was asked for."""
