"""A plan with its reasons: what each sharding saves, and what it moves."""

import dataclasses
from collections.abc import Mapping, Sequence

from tfdist.extensions.tensor.plans.plan import TensorPlan
from tfdist.tables import size_text, table_lines


@dataclasses.dataclass(frozen=True)
class SuggestedSharding:
    """The suggestion for one layer.

    Attributes:
        path: the layer's path.
        kind: the name of its class, such as "Dense".
        role: "column", "row", "vocab" or "replicate".
        is_paired: its output stays local up to layers sharded by row, or its input comes local from layers sharded by column.
        saved_bytes: parameter bytes that each rank no longer holds. Gradients and optimizer state come on top.
        moved_bytes: bytes through each rank in one training step, forward and backward.
        reason: what it moves, or why it stays whole.
    """

    path: str
    kind: str
    role: str
    is_paired: bool
    saved_bytes: int
    moved_bytes: int
    reason: str


class SuggestedPlan(TensorPlan):
    """A `TensorPlan` made by `suggest_plan`. Prints as a table; `as_dict()` gives the patterns to edit.

    Args:
        patterns: the plan.
        shardings: one `SuggestedSharding` per layer that could be sharded, in the order in which the model calls them.
        tensor_parallel_size: the ranks it was made for.
        examples: the examples of a replica in one step, which `moved_bytes` holds for.
        parameter_bytes: of the whole model.
        notes: what could not be followed in the model, and what was assumed.
    """

    def __init__(
        self,
        patterns: Mapping[str, str],
        *,
        shardings: Sequence[SuggestedSharding],
        tensor_parallel_size: int,
        examples: int,
        parameter_bytes: int,
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__(patterns)
        self.shardings = tuple(shardings)
        self.tensor_parallel_size = tensor_parallel_size
        self.examples = examples
        self.parameter_bytes = parameter_bytes
        self.notes = tuple(notes)

    @property
    def saved_bytes(self) -> int:
        """The parameter bytes that each rank no longer holds."""
        return sum(sharding.saved_bytes for sharding in self.shardings)

    @property
    def moved_bytes(self) -> int:
        """The bytes through each rank in one training step."""
        return sum(sharding.moved_bytes for sharding in self.shardings)

    def __str__(self) -> str:
        cells = [["layer", "kind", "role", "paired", "saved", "moved", ""]]
        for sharding in self.shardings:
            sizes = size_text(sharding.saved_bytes), size_text(sharding.moved_bytes)
            paired = "yes" if sharding.is_paired else ""
            cells.append([sharding.path, sharding.kind, sharding.role, paired, *sizes, sharding.reason])
        total = f"of {size_text(self.parameter_bytes)} parameters"
        cells.append(["together", "", "", "", size_text(self.saved_bytes), size_text(self.moved_bytes), total])
        header, *lines, last = table_lines(cells, "<<<<>><")
        rule = "-" * max(map(len, (header, *lines, last)))
        examples = "1 example" if self.examples == 1 else f"{self.examples} examples"
        title = [
            f"Suggested sharding over {self.tensor_parallel_size} tensor ranks",
            "saved: parameter bytes that each rank no longer holds; gradients and optimizer state come on top",
            f"moved: bytes through each rank in a training step of {examples} per replica, forward and backward",
        ]
        return "\n".join([*title, header, rule, *lines, rule, last, *self.notes])
