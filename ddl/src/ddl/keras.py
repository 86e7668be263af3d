"""DDL for Keras on TensorFlow: `import ddl.keras as ddl`. The names of ddl.tensorflow."""

from ddl.tensorflow import *  # noqa: F403
