"""The benchmark is a folder of modules that runs as a program, so its tests put the folder on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "lms" / "bench"))
