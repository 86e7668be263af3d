"""Measure what a watched training costs: `python lms/bench/watching.py`. docs/results/ has what it said.

The share of a core that the sampler's thread takes, with event files and a port, beside a training whose pass saves
1,000 tensors; and the processor time of a scrape of the page.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest

import lms
from lms.memory.machine import machine

SCRAPES = 50


def main() -> None:
    """Measure, and print one JSON document. Times in seconds, of a processor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the training runs (default 60)")
    parser.add_argument("--tensors", type=int, default=1000, help="how many tensors a pass saves (default 1000)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # many small operations: two threads would wait for one another
    weights = [torch.randn(1 << 14, requires_grad=True) for _ in range(args.tensors)]
    optimizer = torch.optim.SGD(weights)
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        with lms.LMS(optimizer=optimizer, budget="1GB", min_size=0, tensorboard=folder, metrics_port=port) as session:
            _step(weights, optimizer)
            assert session._watch is not None
            sampler = session._watch._sampler
            samples, before, began = sampler._samples, _thread_seconds(sampler._thread.native_id), time.monotonic()
            while time.monotonic() - began < args.seconds:
                _step(weights, optimizer)
            wall = time.monotonic() - began
            used = _thread_seconds(sampler._thread.native_id) - before
            samples = sampler._samples - samples
            page = sampler._page
            assert page is not None
            assert page._server is not None
            registry = CollectorRegistry(auto_describe=False)
            registry.register(page._server)
            scraped = time.thread_time()
            for _ in range(SCRAPES):
                size = len(generate_latest(registry))  # type: ignore[no-untyped-call]
            scraped = (time.thread_time() - scraped) / SCRAPES
        stats = session.stats()
    print(
        json.dumps(
            {
                "machine": machine(),
                "torch": torch.__version__,
                "tensors": args.tensors,
                "steps": stats["steps"],
                "wall": wall,
                "samples": samples,
                "sampler_seconds": used,
                "sampler_share": used / wall,
                "sample_seconds": used / max(1, samples),
                "scrape_seconds": scraped,
                "page_bytes": size,
            },
            indent=2,
        )
    )


def _step(weights: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    sum((weight * weight).sin().sum() for weight in weights).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()


def _thread_seconds(thread: int | None) -> float:
    """Seconds that a thread of this process has been on a processor."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


if __name__ == "__main__":
    main()
