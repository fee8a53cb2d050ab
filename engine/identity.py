"""Who computed a block: the namespace of a model directory, from the weights' full content.

Hashing half a gigabyte takes half a second, so digests are remembered by path, size, modification
time and inode in one small file in the user's cache directory. A file that changes in place without
changing any of them is not noticed; every ordinary tool changes the time.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from hashlib import blake2b, file_digest
from pathlib import Path

import kvtier
from kvtier.engine.model_config import ModelConfig
from kvtier.engine.weights import weight_files
from kvtier.index.namespace import BlockLayout, Namespace, digest_fields


def namespace_of(
    directory: Path,
    config: ModelConfig,
    layout: BlockLayout,
    *,
    salt: str = "",
    memory: Path | None = None,
) -> Namespace:
    """Everything that must agree for `directory`'s K and V to be reused.

    `memory`: where file digests are remembered (default: the user's cache directory).
    """
    return Namespace(
        weights=weights_digest(weight_files(directory), memory or default_memory()),
        config=config.digest,
        layout=layout,
        compute_dtype=layout.dtype,
        engine="kvtier",
        engine_version=kvtier.__version__,
        rope=repr(config.rope),
        salt=salt,
    )


def default_memory() -> Path:
    """`$XDG_CACHE_HOME/kvtier/weights.json`, or below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvtier" / "weights.json"


def weights_digest(files: Sequence[Path], memory: Path) -> str:
    """Hex digest over the names and full contents of `files`."""
    known = _recall(memory)
    fresh = dict(known)
    fields: list[tuple[str, int | str]] = []
    for path in files:
        mark = _mark(path)
        if mark not in known:
            with path.open("rb") as file:
                fresh[mark] = file_digest(file, lambda: blake2b(digest_size=32)).hexdigest()
        fields.append((path.name, fresh[mark]))
    if fresh != known:
        _remember(memory, fresh)
    return digest_fields("kvtier-weights-1", fields).hex()


def _mark(path: Path) -> str:
    stat = path.stat()
    return f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_dev}:{stat.st_ino}"


def _recall(memory: Path) -> dict[str, str]:
    """What was remembered; nothing if the file is absent or unreadable (it is only a memory)."""
    try:
        value = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {mark: digest for mark, digest in value.items() if isinstance(digest, str)}


def _remember(memory: Path, digests: dict[str, str]) -> None:
    """Replace the file in one step. Failing to (a read-only home) costs a hash, nothing else."""
    newest = dict(list(digests.items())[-256:])
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=memory.parent, prefix=memory.name, delete=False, encoding="utf-8"
        ) as file:
            json.dump(newest, file, indent=0)
        os.replace(file.name, memory)
    except OSError:
        return
