"""The benchmark on the virtual cluster is a folder of programs, which import their neighbours by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "ddl" / "bench"))
