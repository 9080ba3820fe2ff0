"""What the audit finds and may find, each with the reason. Anything else fails the test."""

from __future__ import annotations

import dataclasses
import re

from tests.gpu_audit.audit import Finding


@dataclasses.dataclass(frozen=True)
class Allowed:
    """Findings of `kind` whose text `pattern` matches as a whole, in the steps in whose names `steps` is found."""

    kind: str
    pattern: str
    reason: str
    steps: str = ""

    def allows(self, finding: Finding, step: str) -> bool:
        is_here = re.search(self.steps, step) is not None
        return is_here and finding.kind == self.kind and re.fullmatch(self.pattern, finding.what) is not None


_LOGS = (
    "Const|Identity|AddN|AddV2|Sub|Mul|MulNoNan|RealDiv|DivNoNan|Mean|Sum|ConcatV2|Reshape|Pack|Unpack|SplitV|StridedSlice|SelectV2"
    "|IsInf|Less|LogicalAnd|Cast"
)

ALLOWED = (
    Allowed("unplaced", _LOGS, "Keras's own, around the ranks' part of a step: its logs, some numbers, on the first GPU"),
    Allowed("unplaced", "IteratorGetNext.*|Optional.*", "the next batch, and what says whether there is one"),
    Allowed("compiled", "without collectives", "Keras's convolutions in groups and with dilation", "convolutions in groups"),
    Allowed("missing", r"Const\(\) -> \(string\)", "the text of an assertion, which is read on the host"),
    Allowed(
        "missing", r"(GatherV2|Reshape)\(string,.*", "names of drifting weights, in the steps that look for them", "sequence"
    ),
    # What the host waits for
    Allowed(
        "to the host",
        "int32 Cast -> StatelessRandomGetKeyCounter",
        "Keras's dropout: its seed is a variable on the GPU, and TensorFlow wants seeds on the host",
    ),
    Allowed(
        "to the host",
        "int32 SelectV2 -> (Reshape|AddV2|Less|Identity)",
        "token ids of int32, which TensorFlow compares and reshapes on the host; ids of int64 have none of these",
        "stage|mixed|float32|pipeline|2x2x2|recomputation|int32",
    ),
    Allowed("to the host", "int32 BitwiseAnd -> Less", "Keras's argmax, of the metric accuracy, looks at bits"),
    Allowed(
        "to the host", "bool Equal -> If", "whether this step of an accumulation updates, or all gradients are finite: a branch"
    ),
    Allowed("to the host", "bool Less -> StatelessIf", "a learning rate's warm-up, which Keras writes as a branch", "schedule"),
    Allowed("to the host", "int32 DynamicStitch -> Reshape", "TensorFlow's gradient of a mean of unknown size", "uneven"),
    Allowed("to the host", "bool LogicalNot -> Assert", "in the steps that look for drifting weights", "sequence"),
    Allowed("to the host", "int32 Cast -> (Less|Sum)|bool LogicalAnd -> Assert", "Keras's lengths of masked rows", "LSTM|GRU"),
    Allowed("to the host", "int32 TensorListPopBack -> .*", "TensorFlow's gradient of a loop", "LSTM in a loop|SimpleRNN"),
    Allowed(
        "to the host",
        "int32 (CollectiveGatherV2|CollectiveAllToAllV2|Cast|Prod) -> .*",
        "lengths that differ by rank become a shape; TensorFlow reshapes int32 on the host",
        "collectives of every dtype",
    ),
    Allowed("to the host", "bool All -> Assert", "`tf.nn.compute_average_loss` checks a number of rows", "loop of one's own"),
    # What no one waits for on the host
    Allowed("to the GPU", "(bool|int32|int64|uint64) .*", "shapes, ids, masks and the keys of random numbers"),
    Allowed("to the GPU", "int8 CudnnRNNV3 -> ZerosLike", "what cuDNN keeps on the host for its backward pass", "LSTM|GRU"),
    Allowed("across", r"GPU to GPU: b?float(16|32) \w+ -> Identity", "messages of a pipeline in one process", "pipeline|2x2x2"),
    Allowed(
        "across", "GPU to host: float32 Identity -> AddN", "`strategy.reduce` of a loss outside the ranks", "loop of one's own"
    ),
)


def refused(found: list[Finding], step: str) -> list[Finding]:
    """Returns of what is found in `step` what is not allowed."""
    return [finding for finding in found if not any(one.allows(finding, step) for one in ALLOWED)]
