"""`python -m kvtier.tools.prewarm …` and `python tools/prewarm …`: the same as `kvtier prewarm`."""

import sys

from kvtier.tools.cli import main

if __name__ == "__main__":
    sys.exit(main(["prewarm", *sys.argv[1:]]))
