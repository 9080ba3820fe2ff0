"""Branches of a rank's function in which collectives stand: `tf.cond` and `tf.case` around an optimizer's step, say.

    program                                   the rank's: emits in the graph of `strategy.run`
      └ tf.cond(step % 5 == 0, ...)
          ├ program of the first branch       emits in the branch's graph, when a gradient, a step or a write is met in it
          └ program of the second

All ranks must take the same branch, or some would wait for ever. So what selects the branch is compared over the ranks of every
group that meets in it, before the branch is entered: one message of two numbers, and an error where they differ.

Note: order. Collectives of a branch stand on the rank's chain, which the whole `tf.cond` writes: what is emitted outside stands
before it or after it. Tensors that a branch reads from outside must be there before it, and so whatever the outer program still
has to send for that is sent when the branches have been traced, before TensorFlow makes the `tf.cond` of them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import group_ops
from tfdist.collectives.plan import Ranks
from tfdist.collectives.program import BranchPoint, RankProgram
from tfdist.collectives.where import rank_program
from tfdist.graphs import tape

Build = Callable[[tf.Tensor, Sequence[Callable[[], Any]]], Any]

_READ_ONLY = "_read_only_resource_inputs"  # TensorFlow's attribute of operations that call functions


def trace_branches(selector: Any, functions: Sequence[Callable[[], Any]], build: Build) -> Any:
    """Returns `build(selector, functions)`, which traces `functions` as the branches of a `tf.cond` or a `tf.case`.

    In the function of a rank the branches may hold collectives.
    """
    program = rank_program()
    if program is None or program.is_eager or isinstance(selector, bool | int) or not program.may_branch_here(selector):
        return build(selector, list(functions))
    selector = tf.compat.v1.get_default_graph().capture(tf.convert_to_tensor(selector))  # which may be of further out
    return Selection(program.root, selector if selector.shape.rank == 0 else tf.reshape(selector, [])).build(functions, build)


class Selection(BranchPoint):
    """One `tf.cond` or `tf.case` of a rank's function, while it is traced.

    Args:
        root: the rank's program.
        selector: what selects the branch, a boolean or an index.

    Attributes:
        is_recorded: whether tapes record around it: what is sent in a branch has no way back to them.
    """

    def __init__(self, root: RankProgram, selector: tf.Tensor):
        self._root = root
        self._graph = tf.compat.v1.get_default_graph()
        self._selector = self._agreed = selector
        self.is_recorded = tape.is_recording()
        self._compared: set[Ranks] = set()
        self._branches: list[tf.Graph] = []
        self.programs: dict[tf.Graph, RankProgram] = {}  # of the branches that have one

    def build(self, functions: Sequence[Callable[[], Any]], build: Build) -> Any:
        began = len(self._graph.get_operations())
        traced = [functools.partial(self._trace, one, place == len(functions)) for place, one in enumerate(functions, 1)]
        result = build(self._selector, traced)
        if self._agreed is not self._selector:
            operation = next(
                op
                for op in reversed(self._graph.get_operations()[began:])
                if op.type in tape.BRANCHES and op.inputs[0].name == self._selector.name
            )
            operation._update_input(0, self._agreed)
        return result

    def _trace(self, function: Callable[[], Any], is_last: bool) -> Any:
        graph = tf.compat.v1.get_default_graph()
        self._branches.append(graph)
        self._root.branch_points[graph] = self
        outputs = function()
        if (program := self.program_of(graph) if self.has_sent else self.programs.get(graph)) is not None:
            outputs = tf.nest.map_structure(functools.partial(self._returned, program), outputs)
            program.close(outputs)
        if is_last and (self.programs or self._compared):
            read = [outside for branch in self._branches for outside, _ in branch.captures if tf.is_symbolic_tensor(outside)]
            with self._graph.as_default():
                for part in self._root.innermost().parts:
                    part.before_branch(read)
        return outputs

    def _returned(self, program: RankProgram, output: Any) -> Any:
        """Returns what stands for `output` of a branch: where that has sent something, nobody can compute it again outside."""
        found = program.summand_made_here(output)
        if found is not output or not (self.has_sent and tf.is_symbolic_tensor(output) and program.exists_here(output)):
            return found
        return output if tape.tapes_watching([output]) else self._root.returned_by(program, output)

    @property
    def has_sent(self) -> bool:
        """Whether collectives stand in a branch: what selects is compared for each."""
        return bool(self._compared)

    def program_of(self, branch: tf.Graph) -> RankProgram | None:
        """Returns the program of a branch, made on first use; None in a place where no program may stand."""
        if branch not in self.programs:
            with self._graph.as_default():
                outer = self._root.here()
            if outer is None:
                return None
            self._agreed = outer.selected_by(outer, self._agreed)
            self.programs[branch] = outer.of_branch(branch)
        return self.programs[branch]

    def compare(self, ranks: Ranks) -> None:
        """Lets the branches be entered only where all `ranks` enter the same one."""
        if len(ranks) == 1 or ranks in self._compared:
            return
        self._compared.add(ranks)
        with self._graph.as_default(), tf.device(self._root.device):
            number = tf.cast(self._agreed, tf.int32)
            extremes = group_ops.all_reduce(self._root.innermost(), tf.stack([number, -number]), ranks, "min", "branch")
            message = errors.message(
                "The ranks take different branches of a `tf.cond` that holds a collective, such as those of `optimizer.apply`, "
                "of a gradient or of a Keras loss: some of them would wait for ever.",
                fix="Branch on what is the same on all ranks: a step counter, or a number that is reduced first, "
                "`tfdist.collectives.all_reduce(x, reduce_op=...)`.",
            )
            check = tf.debugging.Assert(tf.equal(extremes[0], -extremes[1]), [message])
            with tf.control_dependencies([check]):
                self._agreed = tf.identity(self._agreed)


def writes_to(resource: tf.Tensor, operation: tf.Operation) -> bool:
    """Whether `operation`, which is given `resource`, writes it, or may do so."""
    if operation.type == "ReadVariableOp":
        return False
    places = [place for place, tensor in enumerate(operation.inputs) if tensor.name == resource.name]
    try:
        return not set(places) <= set(operation.get_attr(_READ_ONLY))
    except ValueError:
        return not operation.type.startswith("Resource") or "Gather" not in operation.type
