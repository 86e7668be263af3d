"""`python -m images`."""

from bundle.process import leave
from images.cli import main

if __name__ == "__main__":
    leave(main())
