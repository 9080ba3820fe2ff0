"""What devices and links can do: data sheets, fits, files."""

import math

import keras
import pytest
import tensorflow as tf

from tfdist.tools.planning.data_sheets import DATA_SHEETS, OF_BANDWIDTH, OF_PEAK, from_sheet
from tfdist.tools.planning.hardware import BUS_FACTORS, Collective, Hardware, fitted, from_file


def test_bus_factors_are_those_of_nccl_tests():
    assert {name: factor(4) for name, factor in BUS_FACTORS.items()} == {
        "all_reduce": 1.5,
        "reduce_scatter": 0.75,
        "all_gather": 0.75,
        "all_to_all": 0.75,
        "broadcast": 1,
        "send": 1,
    }


# TFLOP/s in half precision, and bytes per second of the link.
PEAKS = {"v100": (125, 150e9), "a100": (312, 300e9), "h100": (989.5, 450e9), "h200": (989.5, 450e9), "l40s": (362, 32e9)}


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_data_sheets_say_that_they_are_not_measured(name):
    hardware, (tflops, link_speed) = from_sheet(name.upper()), PEAKS[name]
    assert not hardware.measured and hardware.source.endswith("data sheet; not measured")
    assert hardware.flops_per_second("bfloat16", 1e12) == OF_PEAK * 1e12 * tflops
    within, between = (hardware.collective_seconds("all_reduce", 1e9, 8, link) for link in ("within", "between"))
    assert within < between
    assert math.isclose(within, 20e-6 + 1.75e9 / (0.8 * link_speed))


def test_adam_reads_and_writes_thirty_numbers_a_parameter():
    """Each of its operations goes over all elements: those of its inputs and outputs, and the variable that it changes, twice."""
    variable, optimizer = keras.Variable(tf.zeros([1000])), keras.optimizers.Adam()
    optimizer.build([variable])
    update = tf.function(lambda gradient: optimizer.update_step(gradient, variable, tf.constant(0.1)))
    ops = update.get_concrete_function(tf.TensorSpec([1000])).graph.get_operations()
    computing = [one for one in ops if one.type not in ("Identity", "Placeholder", "ReadVariableOp")]
    moved = [sum(x.shape == [1000] for x in (*one.inputs, *one.outputs)) for one in computing]
    changed = sum(one.type in ("AssignAddVariableOp", "AssignSubVariableOp") for one in computing)
    assert sum(moved) + 2 * changed == 30 and sum(map(bool, moved)) == 12
    assert from_sheet("a100").update_seconds == pytest.approx(30 * 4 / (OF_BANDWIDTH * 2039e9))


def test_a_device_of_which_there_is_none():
    with pytest.raises(ValueError, match="`hardware` must be one of v100, a100, h100, h200, l40s.*Measure it"):
        from_sheet("abacus")


@pytest.mark.parametrize("name", BUS_FACTORS)
@pytest.mark.parametrize("ranks", [2, 5])
def test_a_fit_finds_what_made_the_times(name, ranks):
    made = Collective(alpha=3e-4, beta=2e9)
    rows = [{"bytes": size, "seconds": made.seconds(name, size, ranks)} for size in (4096, 2**16, 2**20, 2**26)]
    found = fitted(rows, name, ranks)
    assert math.isclose(found.alpha, made.alpha, rel_tol=1e-6) and math.isclose(found.beta, made.beta, rel_tol=1e-6)
    noisy = [{**row, "seconds": row["seconds"] * factor} for row, factor in zip(rows, (1.1, 0.9, 1.1, 0.9), strict=True)]
    found = fitted(noisy, name, ranks)
    for row in rows:
        assert math.isclose(found.seconds(name, row["bytes"], ranks), row["seconds"], rel_tol=0.15)


def test_a_fit_of_noise_is_never_negative():
    found = fitted([{"bytes": 1000, "seconds": 1e-6}, {"bytes": 10**6, "seconds": 2e-3}], "send", 2)
    assert found.alpha == 0 and found.beta > 0
    found = fitted([{"bytes": 1000, "seconds": 2e-3}, {"bytes": 10**6, "seconds": 1e-3}], "send", 2)
    assert found.beta == math.inf and 1e-3 < found.alpha < 2e-3
    with pytest.raises(ValueError, match="`rows` must have two sizes or more"):
        fitted([{"bytes": 1000, "seconds": 1e-6}] * 2, "send", 2)


def hardware(**changes):
    points = {"float32": [(1e6, 1e9), (1e8, 3e9), (1e10, 4e9)]}
    links = {"within": dict.fromkeys(BUS_FACTORS, Collective(1e-4, 1e9))}
    return Hardware(
        **{"name": "two CPUs", "matmul": points, "bytes_per_second": 1e10, "operation_seconds": 1e-5, "links": links, **changes}
    )


def test_rates_between_the_measured_ones():
    known = hardware()
    rates = [known.flops_per_second("float32", flops) for flops in (0, 1e6, 1e7, 1e8, 1e9, 1e15)]
    assert rates == [1e9, 1e9, pytest.approx(2e9), pytest.approx(3e9), pytest.approx(3.5e9), 4e9]
    with pytest.raises(ValueError, match="`dtype` must be one of float32 on two CPUs"):
        known.flops_per_second("float16", 1e9)


def test_links_that_were_not_measured():
    assert hardware().collective_seconds("send", 1e9, 2, "between") == 1 + 1e-4
    assert hardware(links={}).collective_seconds("send", 1e9, 1) == 0
    with pytest.raises(ValueError, match="`hardware` must know the links"):
        hardware(links={}).collective_seconds("send", 1e9, 2)


def test_a_file_holds_all_of_it(tmp_path):
    known = hardware(measured=True, sharing=2.0, overlap=1.2, update_seconds=1e-9, memory_bytes=8e9, source="here")
    known.to_file(tmp_path / "hardware.json")
    assert from_file(tmp_path / "hardware.json") == known


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}', '{"format": 1, "matmul": {}, "links": {}}', "3"])
def test_files_of_something_else(tmp_path, text):
    path = tmp_path / "hardware.json"
    path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match="`calibration` must be a file of `calibrate`"):
        from_file(path)
    with pytest.raises(ValueError, match="`calibration` must be a file that can be read"):
        from_file(tmp_path / "none.json")
    path.write_text('{"format": 99}', "utf-8")
    with pytest.raises(ValueError, match="of another version"):
        from_file(path)
