"""What the forks of `tests.forks` begin with."""

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import tfdist  # noqa: F401
from tests import garbage, op_creation

garbage.collect_seldom()
op_creation.simplify()
garbage.leave_alone_what_is_there()  # Keras collects garbage in `clear_session`: it need not look through all that was imported
