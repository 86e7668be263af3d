"""`python -m images`."""

from bundle.ending import leave
from images.cli import main

if __name__ == "__main__":
    leave(main())
