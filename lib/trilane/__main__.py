"""`python -m trilane` is the command `trilane`."""

import sys

from trilane.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
