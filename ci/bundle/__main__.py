"""`python -m bundle`."""

import sys

from bundle.cli import main

if __name__ == "__main__":  # and not where a process is spawned
    sys.exit(main())
