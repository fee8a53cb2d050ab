#!/usr/bin/env bash
# Everything that only a GPU can tell: bench/gpu_suite.py says what, bench/README.md what the figures are.
# PYTHON names the interpreter (default: the one `make install` makes). Nothing is installed here: on a
# machine with a GPU that interpreter's torch must be a CUDA build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-.venv/bin/python}"
if ! command -v "$python" >/dev/null; then
    echo "gpu_suite: no $python here; run make install, or name a Python with a CUDA build of torch (PYTHON=...)" >&2
    exit 2
fi
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m bench.gpu_suite "$@"
