"""`python -m lms.sweep.plain FILE SCRIPT [ARGS...]`: a run without LMS whose peak and step time go to FILE."""

from __future__ import annotations

import sys
from pathlib import Path

from lms.target import Target
from lms.torch.launcher import plain


def main(argv: list[str]) -> int:
    """Run the script (or `-m MODULE`) as python does; its exit status."""
    path, name, *rest = argv
    is_module = name == "-m"
    if is_module:
        name, *rest = rest
    return plain(Target(name, tuple(rest), is_module=is_module), Path(path).absolute())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
