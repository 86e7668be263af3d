"""`python -m bundle`."""

from bundle.cli import main
from bundle.process import leave

if __name__ == "__main__":  # and not where a process is spawned
    leave(main())
