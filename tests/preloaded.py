"""What the forks of `tests.forks` begin with."""

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

from tests import fork_coverage

fork_coverage.measure_what_is_imported()

import tfdist  # noqa: E402, F401
from tests import garbage, op_creation  # noqa: E402

garbage.collect_seldom()
op_creation.simplify()
garbage.leave_alone_what_is_there()  # Keras collects garbage in `clear_session`: it need not look through all that was imported
