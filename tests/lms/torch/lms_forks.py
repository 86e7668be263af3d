"""`lms` again and again, each in a fork of one process that has imported PyTorch, which takes seconds, already.

Each line of stdin is a run in JSON: its argv, cwd, environment, and the files for its stdout and stderr. The answer is
a line with its exit status.
"""

import gc
import json
import os
import sys

import torch
import torch._dynamo

import lms.torch.session  # noqa: F401  # these two are what a run imports
from lms.cli import main

torch.set_num_threads(1)  # OpenMP does not survive a fork
gc.freeze()
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

# The child goes on here and ends as a process of its own does.
os.chdir(request["cwd"])
os.environ.clear()
os.environ.update(request["environment"])
for descriptor, path in ((0, os.devnull), (1, request["stdout"]), (2, request["stderr"])):
    os.dup2(os.open(path, os.O_RDWR), descriptor)
sys.argv = ["lms", *request["argv"]]
sys.exit(main())
