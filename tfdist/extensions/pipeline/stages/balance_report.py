"""A table of a model's stages: how evenly the model is split.

stage  rank  layers                FLOPs  share      weights  to the next stage
-------------------------------------------------------------------------------
    0     0  embed .. block_0    21.30 M  47.0%  412.00 kB              4.10 kB
    1     1  block_1 .. head     24.02 M  53.0%  380.00 kB                    -
-------------------------------------------------------------------------------
Largest stage / mean: 1.06. FLOPs of a forward pass and bytes to the next stage are those of one example.
"""

import itertools
from collections.abc import Sequence

from tfdist.extensions.pipeline.stages.costs import Cost, bytes_of, bytes_per_example
from tfdist.extensions.pipeline.stages.staged_model import StagedModel
from tfdist.tables import size_text, table_lines

_COLUMNS = ("stage", "rank", "layers", "FLOPs", "share", "weights", "to the next stage")


def report(staged: StagedModel, costs: Sequence[Cost]) -> str:
    """Returns a table of what each stage has and costs, and the balance: the FLOPs of the largest stage over the mean.

    A weight that stages share counts in each of them, as each holds it. A tensor that travels on over several stages counts in
    each stage that hands it on.

    Args:
        staged: the model in stages.
        costs: `node_costs` of the same model.
    """
    left = iter(costs)
    flops = [sum(cost.flops for cost in itertools.islice(left, len(stage.nodes))) for stage in staged.stages]
    total = sum(flops) or 1
    rows = [_COLUMNS]
    for stage, of_stage in zip(staged.stages, flops, strict=True):
        is_last = stage.index == staged.last_stage
        first, last = stage.operations[0].name, stage.operations[-1].name
        rows.append(
            (
                str(stage.index),
                str(staged.schedule.rank_of(stage.index)),
                first if first == last else f"{first} .. {last}",
                size_text(of_stage, ""),
                f"{of_stage / total:.1%}",
                size_text(sum(map(bytes_of, stage.variables))),
                "-" if is_last else size_text(bytes_per_example(stage.stage_outputs)),
            )
        )
    balance = max(flops) * len(flops) / total
    note = f"Largest stage / mean: {balance:.2f}. FLOPs of a forward pass and bytes to the next stage are those of one example."
    header, *lines = table_lines(rows, ">><>>>>")
    rule = "-" * len(header)
    return "\n".join([header, rule, *lines, rule, note])
