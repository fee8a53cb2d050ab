"""The root of every error a user may see. Knows no tier, no model and no command line."""


class KvtierError(Exception):
    """Something the user can mend. The message is one line: it names the thing and the cure.

    Programs print it without a traceback and exit with code 2. A bug of ours is never one of
    these; it stays an ordinary exception with its traceback.
    """


class BadTokens(KvtierError):
    """Token ids that are not a one-dimensional run of non-negative 32-bit integers."""
