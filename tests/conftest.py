"""What holds for the whole test process. Knows no room."""

import os
from pathlib import Path

# Triton reads this when it is first imported, whichever test does that. Where there is no GPU its
# kernels run in the interpreter, on CPU tensors.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Child processes of tests import `tests.…` helpers too, also where PYTHONSAFEPATH hides the folder.
_ROOT = str(Path(__file__).parents[1])
_OTHERS = os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = _ROOT if not _OTHERS else os.pathsep.join((_ROOT, _OTHERS))
