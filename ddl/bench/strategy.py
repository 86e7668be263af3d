"""Measure how DDL and MultiWorkerMirroredStrategy reduce a Keras model's gradients, on a virtual cluster (needs root).

    ci/setup_tensorflow && .venv/bin/python ddl/bench/strategy.py [--rounds 10] [--racks 2,2] [--json FILE]

Four hosts with a rank each. In one job, in turn: DDL, as DistributedOptimizer reduces, and the strategy's default. The
figure is the time of a reduction of all gradients on the slowest rank, from a barrier on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "testbed"))

from testbed import cluster, running  # noqa: E402 - it is no package

PYTHON = ROOT / "out/tensorflow/bin/python"
SECONDS = 300
PORTS = (29400, 29500)  # of DDL's rank 0, and of the strategy's workers: the hosts are new


def main() -> int:
    """Run the job, and print the medians; 1 if it failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--racks", default="2,2", help="hosts in each rack")
    parser.add_argument("--link", default="200mbit")
    parser.add_argument("--uplink", default="100mbit", help="of a rack, if there are two")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    racks = [int(count) for count in asked.racks.split(",")]
    bed_of = cluster(racks, link=asked.link, uplink=asked.uplink if len(racks) > 1 else None)
    with tempfile.TemporaryDirectory(prefix="ddl-bench-", dir=ROOT / "out") as folder, running(bed_of) as bed:
        record = Path(folder, "record.json")
        addresses = [bed.topology.address(host) for host in bed.hosts]
        workers = [f"{address}:{PORTS[1]}" for address in addresses]
        ranks = []
        for rank, host in enumerate(bed.hosts):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(workers)),
                "MASTER_ADDR": addresses[0],
                "MASTER_PORT": str(PORTS[0]),
                "TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}),
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
            }
            words = [str(PYTHON), str(ROOT / "ddl/bench/strategy_rank.py"), str(asked.rounds), str(record)]
            output = None if rank == 0 else subprocess.DEVNULL
            ranks.append(
                subprocess.Popen(bed.command(host, words, env=environment, cwd=ROOT), stdout=output, stderr=output)
            )
        statuses = [process.wait(SECONDS) for process in ranks]
        if any(statuses):
            print(f"strategy.py: the ranks ended with {statuses}", file=sys.stderr)
            return 1
        found = json.loads(record.read_text())
    times = {name: statistics.median(its) for name, its in found["seconds"].items()}
    ratio = statistics.median(
        other / one for one, other in zip(found["seconds"]["ddl"], found["seconds"]["strategy"], strict=True)
    )
    print(f"{bed_of.picture()}\n{found['tensors']} gradients, {found['bytes'] / 2**20:.1f} MiB, {asked.rounds} rounds")
    for name, median in times.items():
        print(f"{name:10} {median:8.3f} s")
    print(f"DDL is {ratio:.2f} x as fast (the median of the rounds' ratios)")
    if asked.json:
        machine = {"processors": os.cpu_count(), "tensorflow": found["tensorflow"], "link": asked.link}
        asked.json.write_text(json.dumps(found | machine | {"racks": racks, "uplink": asked.uplink, "ratio": ratio}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
