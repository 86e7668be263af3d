"""Two logical processors, for the tests with replicas and those with a host beside the device."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# As on a processor without AVX-512, so that every machine runs the same tests; test_memory.py has oneDNN on. The pairs
# between two processors, which stand for a GPU and its host, do not keep the bits of what oneDNN merges.
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"

try:
    import tensorflow as tf
except ImportError:
    pass  # each test file skips
else:
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "brain_mri"))  # the net
    physical = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(physical, [tf.config.LogicalDeviceConfiguration()] * 2)
