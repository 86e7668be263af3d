"""Rank 0 asks itself, by SIGUSR1, what it has in flight: nothing, then an allreduce that rank 1 has not called."""

import os
import signal
import time

import numpy as np

import ddl

ddl.init()
if ddl.rank() == 0:
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.3)  # the report is printed by a thread of the library, whose words are all that there is to see
    waiting = ddl.allreduce_async(np.ones(4))
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.3)
else:
    time.sleep(1.5)
    waiting = ddl.allreduce_async(np.ones(4))
waiting.wait()
