"""Eviction policies by name. Knows what each needs to be made, and nothing of how it decides."""

import numpy as np

from kvtier.index.follow import adaptive, arc
from kvtier.index.ghosts import fingerprints
from kvtier.index.policy import EvictionPolicy, LeafLru
from kvtier.index.tree import Node

POLICIES = ("lru", "arc", "adaptive")
"""Leaf-LRU; ARC over leaves; the best of several rules, chosen online by shadow caches."""

DEFAULT_POLICY = "lru"


def make_policy(name: str, capacity: int, block_size: int) -> EvictionPolicy[Node]:
    """The policy `name` for a pool of `capacity` blocks of `block_size` tokens.

    Raises `ValueError` for a name that is not in `POLICIES`.
    """
    if name == "lru":
        return LeafLru[Node]()

    def marks(node: Node) -> bytes:
        return fingerprints(node.namespace, np.frombuffer(node.data, np.int32), block_size)

    if name == "arc":
        return arc(capacity, marks)
    if name == "adaptive":
        return adaptive(capacity, marks)
    raise ValueError(f"policy: {name!r} given, want one of {', '.join(POLICIES)}")
