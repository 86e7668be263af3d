"""Makes calls, then none for some seconds. Prints how often its threads woke meanwhile, and how long they ran."""

import time
from contextlib import suppress
from pathlib import Path

import numpy as np

import ddl


def wakes() -> int:
    """How often the threads of this process have waited for something so far."""
    count = 0
    for path in Path("/proc/self/task").glob("*/status"):
        with suppress(OSError):  # the thread has ended
            count += int(path.read_text().split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return count


ddl.init()
for _ in range(100):
    ddl.allreduce_async(np.ones(1000, np.float32)).wait()
time.sleep(0.5)  # rests grow longer
before, ran = wakes(), time.process_time()
time.sleep(3)
rate, ran = (wakes() - before) / 3, time.process_time() - ran
print(f"woke {rate:.1f} times a second, ran {ran:.4f} s", flush=True)
ddl.barrier()
