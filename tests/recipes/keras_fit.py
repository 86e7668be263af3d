"""The test of the recipe bascule-tensorflow: a small Keras fit, plain, under `lms run`, and on several ranks over DDL.

Rank 0 prints the losses and a checksum of the weights, to the last bit.
"""

import hashlib

import keras
import numpy as np
import tensorflow as tf

import ddl.keras as ddl

tf.config.threading.set_intra_op_parallelism_threads(1)  # the tests of other packages run beside it
ddl.init()
keras.utils.set_random_seed(0)
layers = [keras.layers.Conv2D(8, 3, padding="same", activation="tanh") for _ in range(6)]
model = keras.Sequential([keras.Input((32, 32, 1)), *layers, keras.layers.GlobalMaxPooling2D(), keras.layers.Dense(1)])
model.compile(ddl.DistributedOptimizer(keras.optimizers.SGD(0.01 * ddl.size())), "mse", jit_compile=False)
numbers = np.random.default_rng(ddl.rank())  # each rank has images of its own
data = numbers.normal(size=(16, 32, 32, 1)).astype("f4"), numbers.normal(size=(16, 1)).astype("f4")
callbacks = [ddl.DDLCallback(), ddl.DDLGlobalVariablesCallback()]
losses = model.fit(*data, batch_size=8, epochs=2, verbose=0, callbacks=callbacks).history["loss"]
weights = hashlib.sha256(b"".join(one.tobytes() for one in model.get_weights())).hexdigest()
assert len(set(ddl.allgather_object(weights))) == 1, "the ranks have different weights"
if ddl.rank() == 0:
    print(losses, weights)
