"""What holds for the whole test process. Knows no room."""

import os
from pathlib import Path

# Triton reads this when it is first imported, whichever test does that. Where there is no GPU its
# kernels run in the interpreter, on CPU tensors.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
