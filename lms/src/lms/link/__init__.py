"""Links: what the planner is told of one, and how they are measured, shown, compared and watched.

A *link* joins two places where tensors may lie: a GPU and its host, a host and a file, two GPUs, two hosts. The pure
part (`link`, `series`, `profile`, `sweep`, `speeds`, `gpu`, `comparison`) knows no clock and no device; what touches
the machine lies beside it (`memory`, `file`, `cuda`, `nvml`, `counters`, `measure`).
"""

from lms.core.link import KNOWN, Link, parse_link

__all__ = ["KNOWN", "Link", "parse_link"]
