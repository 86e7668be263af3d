"""python -m bascule_caffe: the command `caffe`."""

import sys

from bascule_caffe.cli import main

sys.exit(main())
