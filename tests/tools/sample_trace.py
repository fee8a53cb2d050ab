"""Makes `tools/replay/sample.jsonl`, the small trace that the project ships.

    python -m tests.tools.sample_trace > tools/replay/sample.jsonl

Chats behind one system prompt that grow by a turn each time, questions about documents of which few
are popular, and prompts that nobody repeats; blocks of 16 tokens.
"""

import json
import sys
from collections.abc import Iterator
from random import Random

BLOCK = 16
REQUESTS = 240
SYSTEM = 3


def lines() -> Iterator[str]:
    """The trace, line by line, without ends of line; the same each time."""
    rng = Random(16)
    fresh = iter(range(1 << 30))
    system = [next(fresh) for _ in range(SYSTEM)]
    documents = [[next(fresh) for _ in range(rng.randint(6, 14))] for _ in range(12)]
    chats: list[list[int]] = []
    moment_s = 0.0
    for _ in range(REQUESTS):
        moment_s += rng.expovariate(1 / 4)
        kind = rng.random()
        if kind < 0.5:
            if len(chats) < 4 or rng.random() < 0.2:
                chats.append(list(system))
            ids = rng.choice(chats[-8:])
            ids += [next(fresh) for _ in range(rng.randint(1, 4))]
        elif kind < 0.85:
            popular = min(int(rng.paretovariate(0.9)) - 1, len(documents) - 1)
            ids = [*documents[popular], next(fresh)]
        else:
            ids = [next(fresh) for _ in range(rng.randint(4, 12))]
        yield json.dumps(
            {
                "timestamp": round(moment_s, 3),
                "input_length": len(ids) * BLOCK + rng.randrange(BLOCK),
                "output_length": rng.randint(8, 64),
                "block_size": BLOCK,
                "hash_ids": ids,
            }
        )


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in lines())
