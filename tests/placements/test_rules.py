"""The proof of the table: what a rule says of ranks' parts is so, for all placements of inputs, also of sizes that coincide."""

import os

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.placements import cases_of_parts, cases_of_rows  # noqa: F401
from tests.placements.cases import CASES
from tests.placements.worlds import World, holds
from tfdist.placements.rules import meeting
from tfdist.placements.table import RULES, Kind

# Operations of which no case is known, or none can be made.
WITHOUT_CASE = {
    **dict.fromkeys((name for name, row in RULES.items() if row.kind is Kind.WRITE), "nothing comes back"),
    **dict.fromkeys((name for name, row in RULES.items() if row.kind is Kind.MEETING), "all that it is given meets"),
    "BroadcastGradientArgs": "an axis along which a rank has one row may be among those that are summed: it makes no difference",
}
IN_CHAINS = """
    EmptyTensorList LookupTableFind LookupTableFindV2 OptionalFromValue OptionalGetValue OptionalNone ResourceGather
    ResourceGatherNd RngReadAndSkip StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform StatefulUniformFullInt
    StatefulUniformInt StatelessRandomGetAlg TensorListConcatV2 TensorListElementShape TensorListFromTensor TensorListGather
    TensorListGetItem TensorListLength TensorListPopBack TensorListPushBack TensorListReserve TensorListResize
    TensorListSetItem TensorListStack
    """
WITHOUT_CASE |= dict.fromkeys(IN_CHAINS.split(), "of a handle, which no array can be: test_chains_of_operations.py has some")

# The same on every run; what fails is said by the first case that does, without a search for a smaller one.
SETTINGS = hypothesis.settings(
    max_examples=int(os.environ.get("TFDIST_EXAMPLES_OF_RULES", "15")),
    derandomize=True,
    database=None,
    deadline=None,
    phases=[hypothesis.Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(hypothesis.HealthCheck),
)


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_rule_holds(name):
    known = []

    row, number = RULES[name], SETTINGS.max_examples
    if row.rule is meeting.aligned:  # the one rule that two hundred operations share
        number //= 3
    elif row.kind is Kind.VIEW:  # of most settings
        number *= 6

    @hypothesis.settings(SETTINGS, max_examples=number)
    @hypothesis.given(st.data())
    def check(data):
        world = World(data)
        known.append(holds(CASES[name](world), world))

    check()
    assert any(known), "nothing is known in any case"


def test_each_rule_has_a_case():
    assert RULES.keys() - CASES.keys() - WITHOUT_CASE.keys() == set()
    assert CASES.keys() <= RULES.keys()
