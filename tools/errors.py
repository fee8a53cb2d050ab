"""What the operator's programs may tell their user. Each message names the thing and the cure."""

from kvtier.index.errors import KvtierError


class ModelUnavailable(KvtierError):
    """The demo's model can be neither found nor fetched, or is not one that can be converted."""


class BadDocument(KvtierError):
    """A document, or a list of documents, is missing, unreadable or has nothing in it."""


class BadOption(KvtierError):
    """An option's value, or a combination of options, makes no sense."""


class PrewarmIncomplete(KvtierError):
    """Prewarming stopped early, or some documents could not be stored. What is stored stays."""


class DemoFailed(KvtierError):
    """A step of the demo's script broke its own promise, or one of its processes failed."""


class BadTrace(KvtierError):
    """A request trace cannot be read, or a line of it makes no sense."""
