"""`python -m pyggtrain` is the same as `pyggtrain`."""

import sys

from pyggtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
