"""Where the code that runs now stands: in which rank, or outside all of them.

Whoever must know asks here, and nowhere else. The names are private to Keras and TensorFlow: tests/test_private_names.py fails
when they change.
"""

import enum
import itertools

import tensorflow as tf
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.ops import control_flow_v2_func_graphs

from tfdist import errors
from tfdist.collectives.program import PROGRAM_ATTRIBUTE, RankProgram
from tfdist.graphs.walks import graphs_here

_LOOPS = (control_flow_v2_func_graphs.WhileBodyFuncGraph, control_flow_v2_func_graphs.WhileCondFuncGraph)


class Where(enum.Enum):
    """Where code stands."""

    SYMBOLIC_BUILD = enum.auto()  # Keras works out shapes in a scratch graph: only they and dtypes matter, nothing is sent
    UPDATE = enum.auto()  # TensorFlow updates one rank's component of a variable, from outside replicas
    CROSS_REPLICA = enum.auto()  # outside replicas, where a variable is whole: saving, loading, building a model
    TRACED_RANK = enum.auto()  # the function given to `strategy.run` is traced for one rank
    EAGER_RANK = enum.auto()  # that function runs for one rank, outside any `tf.function`
    # In a replica of another strategy (TensorFlow's default one, outside every scope, too); or in eager code (`tf.init_scope`)
    # within a traced rank, which runs once, when the rank is traced.
    NO_RANK = enum.auto()


def where() -> Where:
    """Returns where the caller stands, seen from the strategy whose scope this is."""
    if in_symbolic_scope():
        return Where.SYMBOLIC_BUILD
    if distribute_lib.get_update_replica_id() is not None:
        return Where.UPDATE
    if tf.distribute.in_cross_replica_context():
        return Where.CROSS_REPLICA
    program = _program_here()
    if program is None:
        return Where.NO_RANK
    return Where.EAGER_RANK if program.is_eager else Where.TRACED_RANK


def rank_program(*, peers_on: str | None = None) -> RankProgram | None:
    """Returns the program of the rank that is being traced, or that runs; None where no rank computes.

    With the mesh axis `peers_on`, the program of a rank that has no peers along it does not count.
    """
    if where() not in (Where.TRACED_RANK, Where.EAGER_RANK):
        return None
    program = _program_here()
    return program if program is None or peers_on is None or program.mesh.size(peers_on) > 1 else None


def is_built_outside() -> bool:
    """Whether Keras works out shapes of a layer that calls a collective, where no rank does: in a functional model's building."""
    return in_symbolic_scope() and _program_here() is None


def current_program(what: str = "A collective") -> RankProgram:
    """Returns the program of the rank that is being traced or runs eagerly, for what cannot be done without one.

    Unlike `rank_program` it finds the rank from within a symbolic build that the rank makes, too: a collective is then traced
    in a graph that is thrown away, and by the first rank alone, which builds the layers: it is a draft of the program.

    Raises:
        RuntimeError: outside `strategy.run` of a tfdist strategy; or in a loop of one traced rank, where collectives hang.
    """
    program = _program_here()
    if program is None:
        raise errors.runtime_error(
            f"{what} was called outside `strategy.run` of a tfdist strategy.",
            fix="Call it in the function that is passed to `strategy.run`.",
        )
    if not program.is_eager and in_loop(program.graph):
        raise errors.runtime_error(
            f"{what} was called in a loop (`tf.while_loop`, `tf.map_fn`, `tf.scan`) inside the function that is passed to "
            "`strategy.run`. TensorFlow's collectives hang there.",
            fix="Use a Python loop, or put the loop around `strategy.run`.",
        )
    return program.draft() if in_symbolic_scope() else program


def is_traced_rank_thread() -> bool:
    """Whether this thread traces a rank, also where it has left the rank for eager code (`tf.init_scope`)."""
    program: RankProgram | None = getattr(tf.distribute.get_replica_context(), PROGRAM_ATTRIBUTE, None)
    return program is not None and not program.is_eager


def _program_here() -> RankProgram | None:
    program: RankProgram | None = getattr(tf.distribute.get_replica_context(), PROGRAM_ATTRIBUTE, None)
    if program is None or program.is_eager:
        return program
    # Eager code in a traced rank stands in `tf.init_scope` and belongs to no rank.
    return None if tf.executing_eagerly() else program.innermost()


def is_visible(tensor: tf.Tensor) -> bool:
    """Whether what is traced here may use `tensor`: it may not where that stands in a branch that is another or has ended."""
    return not tf.is_symbolic_tensor(tensor) or any(graph is tensor.graph for graph in graphs_here())


def in_loop(outermost: tf.Graph) -> bool:
    """Whether the code being traced stands in a loop within `outermost`."""
    return any(isinstance(graph, _LOOPS) for graph in itertools.takewhile(lambda graph: graph is not outermost, graphs_here()))
