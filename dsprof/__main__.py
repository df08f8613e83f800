"""`python -m dsprof` is `dsprof`."""

import sys

from dsprof.cli import main

if __name__ == "__main__":
    sys.exit(main())
