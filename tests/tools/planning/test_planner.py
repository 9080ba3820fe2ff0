"""`tfdist.plan`: what it chooses, that the line which it prints runs, and what bad input gets."""

import keras
import numpy as np
import pytest

import tfdist
from tfdist.tables import size_text
from tfdist.tools.planning.data_sheets import from_sheet
from tfdist.tools.planning.planner import hardware_of
from tfdist.tools.planning.search import SCHEDULES


def build():
    class Block(keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner = [keras.layers.Dense(128, "relu"), keras.layers.Dense(32)]

        def build(self, shape):
            self.inner[0].build(shape)
            self.inner[1].build((*shape[:-1], 128))

        def call(self, x):
            return x + self.inner[1](self.inner[0](x))

        def compute_output_shape(self, shape):
            return shape

    x = inputs = keras.Input((32,))
    for place in range(5):
        x = Block(name=f"block_{place}")(x)
    model = keras.Model(inputs, keras.layers.Dense(7, name="head")(x), name="five_blocks")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.fixture(scope="module")
def plans():
    return tfdist.plan(build, devices=4, memory_per_device="1 GB", batch_size=16, tokens=1e9)


def run(lines):
    """Runs the lines of Python of a plan, on the four logical CPUs, and a step of the model that they make."""
    namespace = {"tfdist": tfdist, "build": build}
    exec(lines, namespace)
    model = namespace["model"]
    if not model.compiled:
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 32)).astype("float32"), rng.integers(0, 7, 16)
    return model.fit(x, y, batch_size=16, verbose=0).history["loss"]


def test_what_it_knows_of_the_model(plans):
    assert plans.model == "five_blocks" and plans.optimizer == "Adam" and plans.blocks == "block"
    assert plans.parameters == 5 * (32 * 128 + 128 + 128 * 32 + 32) + 32 * 7 + 7
    kinds = {(one.candidate.data, one.candidate.tensor, one.candidate.pipeline) for one in plans.candidates}
    assert {(4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 1, 4), (1, 2, 2)} <= kinds
    assert {one.candidate.schedule for one in plans.candidates} == {None, *SCHEDULES}
    by_stage = {
        one.candidate.zero_stage: one.memory.parameters + one.memory.gradients + one.memory.optimizer
        for one in plans.candidates
        if one.candidate.data == 4 and not one.candidate.recompute
    }
    assert [round(by_stage[stage] / plans.parameters, 1) for stage in range(4)] == pytest.approx([16, 10, 7, 4], abs=0.3)
    assert plans.training.tokens == 1e9 and plans.training.days > 0


def test_the_best_plan_is_confirmed(plans):
    found = plans.best.dry_run
    assert found.sent_bytes == found.planned_bytes and found.memory.parameters == plans.best.memory.parameters
    assert "Confirmed by a dry run" in str(plans)
    assert not [one for one in plans.candidates if one.dry_run is not None and one is not plans.best]


def test_the_line_runs(plans):
    assert np.isfinite(run(plans.python)).all()


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_the_lines_of_all_kinds_run(plans):
    """Each way to divide a model, each schedule and recomputation, with the first stage; of data ranks alone, all stages."""
    compressed = {"gradient_compressions": (None, "int8"), "parameter_compressions": (None, "bfloat16"), "zero_stages": (3,)}
    more = tfdist.plan(build, devices=4, memory_per_device="1 GB", batch_size=16, **compressed)
    kinds = {}
    # A step of few microbatches has the operations of all schedules, and is traced in a fraction of the time.
    for one in sorted((*plans.candidates, *more.candidates), key=lambda one: one.candidate.microbatches):
        candidate = one.candidate
        alone = candidate.data == candidate.devices
        of_data = (candidate.zero_stage, candidate.gradient_compression, candidate.parameter_compression) if alone else ()
        recomputed = candidate.recompute and candidate.schedule in (None, "interleaved")
        kinds.setdefault((candidate.tensor > 1, candidate.schedule, recomputed, *of_data), one)
    losses = {one.candidate.name(): run(plans.python_of(one)) for one in kinds.values()}
    assert len(losses) >= 2 * 5 + 2 * 2 + 4 and np.isfinite(list(losses.values())).all(), losses


def test_memory_decides(plans):
    least = min(one.memory.together for one in plans.candidates)
    given = {"devices": 4, "batch_size": 16, "dry_run": False}
    some = tfdist.plan(build, memory_per_device=least, zero_stages=(0, 3), **given)
    assert 0 < len(some.fitting) < len(some.candidates) and some.best.memory.together <= least
    none = tfdist.plan(build, memory_per_device="1 kB", zero_stages=(3,), **given)
    assert not none.fitting and "No plan fits: " in str(none)


def test_hosts_get_groups_that_share_one_copy():
    given = {"devices": 4, "hosts": 2, "batch_size": 16, "dry_run": False}
    over_hosts = tfdist.plan(build, memory_per_device="1 GB", zero_stages=(3,), **given)
    (grouped,) = [one for one in over_hosts.candidates if one.candidate.name() == "zero 3, groups of 2"]
    (whole,) = [one for one in over_hosts.candidates if one.candidate.name() == "zero 3"]
    assert grouped.memory.parameters > 1.9 * whole.memory.parameters
    assert "MultiWorkerShardedStrategy(zero_stage=3, sharding_group_size=2)" in over_hosts.python_of(grouped)


def needs_data():
    model = build()
    model.fit(np.zeros((4, 32), "float32"), np.zeros(4), verbose=0)
    return model


def model_itself():
    return keras.Sequential([keras.layers.Dense(5)])


def one_layer():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)])


GIVEN = {"devices": 4, "memory_per_device": "1 GB", "batch_size": 16}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 0}, "`devices` must be a positive integer"),
        ({"hosts": 3}, "`hosts` must divide `devices`: each has as many. Received: devices=4, hosts=3"),
        ({"batch_size": -1}, "`batch_size` must be a positive integer"),
        ({"memory_per_device": "eighty"}, "`memory_per_device` must be a size in bytes. Received: memory_per_device='eighty'"),
        ({"hardware": "abacus"}, "`hardware` must be one of v100, a100"),
        ({"hardware": "no/such.json"}, "`calibration` must be a file that can be read"),
        ({"optimizer": "hopeful"}, "hopeful"),
        ({"build": None}, "`build` must be a function"),
        ({"build": lambda: 3}, "must return a Keras model"),
        ({"build": lambda: 1 / 0}, "`build` must return a Keras model, but failed: ZeroDivisionError"),
        ({"build": needs_data}, "`build`"),
        (
            {"build": one_layer, "batch_size": 7},
            r"`batch_size` must be one that a plan divides: over 4 devices.*Take 8, or another",
        ),
        ({"build": one_layer, "batch_size": 1}, "`batch_size` must be one that a plan divides.*Take 4,"),
        ({"build": model_itself()}, "`build` must be a function without arguments"),
        (
            {"build": lambda units: one_layer()},
            "`build` must return a Keras model, but failed: TypeError.*called without arguments",
        ),
        ({"hardware": 3}, "`hardware` must be the name of a data sheet"),
        ({"zero_stages": 3}, "`zero_stages` must be some of 0, 1, 2 and 3"),
        ({"zero_stages": ()}, "`zero_stages` must be some of 0, 1, 2 and 3"),
        ({"zero_stages": (4,)}, "`zero_stage` must be 0"),
        ({"sequence_length": -1}, "`sequence_length` must be a positive integer"),
        ({"shown": 0}, "`shown` must be a positive integer"),
        ({"gradient_compressions": "int8"}, "`gradient_compressions` must be several names"),
        ({"gradient_compressions": ("zip",)}, "`gradient_compressions` must be"),
        ({"parameter_compressions": ("int4",)}, "`parameter_compression` must be"),
        ({"tokens": "many"}, "`tokens` must be a positive number"),
        ({"tokens": 1e9, "flops": 1e20}, "`tokens` or `flops` must be None"),
    ],
)
def test_bad_input(changes, message):
    given = {**GIVEN, **changes}
    function = given.pop("build", build)
    with pytest.raises(ValueError, match=message):
        tfdist.plan(function, **given)


class Doubled(keras.layers.Layer):
    """Multiplies by a matrix until the numbers are large: nobody knows beforehand how often."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x):
        def body(x):
            return (keras.ops.matmul(x, self.kernel),)

        return keras.ops.while_loop(lambda x: keras.ops.max(x) < 10.0, body, (x,))[0]

    def compute_output_shape(self, shape):
        return shape


def test_a_loop_of_unknown_length_makes_the_memory_a_lower_bound():
    def of_unknown_length():
        return keras.Sequential([keras.Input((6,)), Doubled(), keras.layers.Dense(2)])

    found = tfdist.plan(of_unknown_length, devices=1, memory_per_device="1 MB", batch_size=8)
    assert found.is_lower_bound and found.to_json()["is_lower_bound"]
    row = next(line for line in str(found).splitlines() if line.startswith("zero 0"))
    left = size_text(1e6 - found.best.memory.together)
    assert ">= " in row and row.endswith(f"yes, if its loops keep less than {left}")
    assert "of unknown length" in str(found)


def test_hardware_in_every_form(tmp_path):
    known = from_sheet("a100")
    known.to_file(tmp_path / "hardware.json")
    assert all(hardware_of(one) == known for one in (known, "A100", tmp_path / "hardware.json", str(tmp_path / "hardware.json")))
    assert hardware_of(None) == from_sheet("h100")
