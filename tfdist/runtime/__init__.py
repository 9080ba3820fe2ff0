"""Level 1: what a process has: its place in a job, how jobs of several workers meet and talk, threads, memory given back.

Only `tf_config` reads TF_CONFIG.
"""

from tfdist.runtime.cluster import Cluster, Task
from tfdist.runtime.coordination import Coordination
from tfdist.runtime.failure_watch import FailureWatch
from tfdist.runtime.first_use import before_first_use, begin_use
from tfdist.runtime.free_memory import give_back_free_memory
from tfdist.runtime.job_run import JobRun, this_run
from tfdist.runtime.leftovers import remove_after_success
from tfdist.runtime.python_random import random_states, set_random_states
from tfdist.runtime.tf_config import read_cluster
from tfdist.runtime.threads import operations_at_once, share_cores
from tfdist.runtime.turns import Turns, helping_another
from tfdist.runtime.watched import Watched
