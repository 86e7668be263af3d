"""`python -m lms` is the command `lms`."""

import sys

from lms.cli import main

sys.exit(main())
