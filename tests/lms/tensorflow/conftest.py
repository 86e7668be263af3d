"""Two logical processors, for the tests with replicas and those with a host beside the device."""

from __future__ import annotations

try:
    import tensorflow as tf
except ImportError:
    pass  # each test file skips
else:
    physical = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(physical, [tf.config.LogicalDeviceConfiguration()] * 2)
