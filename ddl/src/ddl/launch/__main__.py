"""`python -m ddl.launch` is the command `ddlrun`."""

import sys

from ddl.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
