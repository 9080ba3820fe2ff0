"""What the forks of `tests.forks` begin with."""

import gc
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import tfdist  # noqa: F401

gc.collect()
gc.freeze()  # Keras collects garbage in `clear_session`: it need not look through all that was imported
