"""Figures of a running training: OpenMetrics for Prometheus on a port, event files for TensorBoard in a folder.

A thread samples once a second, beside the training and never in a step. DDL's ranks use this package too, so that a
host has one port and one table of names, whatever runs in its processes.

    sampler   the thread, and who is watched
    families  every name on the page, with its kind, its unit and what it means
    page      the page of a host: the ranks hand it their samples, and one of them serves it
    events    TensorBoard's files
"""

from lms.metrics.sampler import Outputs, Watch, watch

__all__ = ["Outputs", "Watch", "watch"]
