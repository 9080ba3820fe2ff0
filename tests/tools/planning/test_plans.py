"""What is printed, written and drawn of plans."""

import dataclasses
import json

import pytest

from tests.tools.planning.fake_estimates import memory_of, time_of
from tfdist.tools.planning.data_sheets import from_sheet
from tfdist.tools.planning.plans import Plans
from tfdist.tools.planning.scaling import training
from tfdist.tools.planning.search import Choices, search

GB = 10**9


def plans(limit, **changes):
    def in_gigabytes(candidate):
        memory = memory_of(candidate)
        return dataclasses.replace(memory, **{name: size * GB for name, size in memory.parts().items()})

    settings = {
        "model": "a model",
        "parameters": 25 * GB,
        "devices": 4,
        "hosts": 2,
        "memory_per_device": limit * GB,
        "batch_size": 8,
        "optimizer": "Adam",
        "candidates": search(Choices(devices=4, batch_size=8), limit * GB, in_gigabytes, time_of),
        "hardware": from_sheet("h100"),
        "blocks": "block_",
        "assumed": ["Something was assumed."],
    }
    return Plans(**{**settings, **changes})


def test_a_table_and_the_line_that_runs_it():
    found = plans(250)
    assert found.best.candidate.name() == "zero 2"
    assert found.python.splitlines()[0] == "strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=2)"
    lines = str(found).splitlines()
    assert lines[0] == "a model: 25 B parameters, 4 x 250.00 GB on 2 hosts, batch 8, Adam"
    assert lines[2].split() == "plan parameters gradients optimizer activations buffers together step * fits".split()
    row = next(line for line in lines if line.startswith("zero 2 "))
    assert row.split()[2:] == "100.00 GB 25.00 GB 25.00 GB 100.00 GB 0 B 250.00 GB 1.2 s * yes".split()
    (worst,) = (line for line in lines if line.startswith("zero 0, recompute"))
    assert worst.endswith("no: 100.00 GB too much, most of it parameters")
    assert "zero 3, recompute takes the least memory, 125.00 GB less, and 50% longer." in lines
    assert lines[-2:] == [
        "* Something was assumed.",
        "* Times are of NVIDIA H100 SXM (NVIDIA H100 data sheet; not measured). Nothing of it is measured: "
        "`python -m tfdist calibrate` does it.",
    ]


def test_recomputation_names_its_blocks():
    found = plans(126)
    assert found.best.candidate.name() == "zero 3, recompute"
    assert found.python.endswith('tfdist.recompute(model, "block_")')


def test_nothing_fits():
    found = plans(100)
    text = str(found)
    assert (
        "No plan fits: zero 3, recompute lacks least, 25.00 GB of a device. Its activations take most, 50.00 GB: a smaller"
        in text
    )
    with pytest.raises(ValueError, match="No plan fits: zero 3, recompute lacks least"):
        _ = found.best
    assert found.to_json()["best"] is None


def test_all_of_it_as_json():
    found = plans(250, training=training(25e9, tokens=1e12))
    told = json.loads(json.dumps(found.to_json()))
    assert told["best"]["candidate"]["zero_stage"] == 2 and told["best"]["time"]["together"] == 1.2
    assert told["best"]["memory"]["together"] == 250 * GB and told["best"]["python"] == found.python
    assert len(told["candidates"]) == 8 and sum(one["fits"] for one in told["candidates"]) == 4
    assert told["training"]["flops"] == 1.5e23 and not told["hardware"]["measured"]
    assert "1.5e+23 FLOPs" in str(found)


def test_a_picture(tmp_path):
    plans(250).draw(tmp_path / "plans.png")
    assert (tmp_path / "plans.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="abc"):
        plans(250).draw(tmp_path / "plans.abc")
