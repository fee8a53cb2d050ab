"""What the engine may tell a user. Each message names the thing and the cure."""

from kvtier.index.errors import KvtierError


class UnsupportedModel(KvtierError):
    """The model directory is whole, but its architecture is not one this engine computes."""


class ModelFileMissing(KvtierError):
    """The model directory lacks a file."""


class BadModelFile(KvtierError):
    """A file of the model directory is damaged or contradicts the configuration."""


class BadPrompt(KvtierError):
    """A prompt that cannot be run: empty, too long, or with ids outside the vocabulary."""


class BadSampling(KvtierError):
    """A sampling parameter outside its range."""


class BadSettings(KvtierError):
    """Engine settings that contradict each other or the machine."""


class NotExact(KvtierError):
    """Exact mode cannot keep its promise here: on this machine, or not any more."""
