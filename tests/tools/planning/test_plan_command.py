"""`python -m tfdist plan`."""

import json

import keras
import pytest

from tfdist.tools.launch import cli
from tfdist.tools.planning.command import add_plan

OPTIONS = f"--model {__name__}:build --devices 2 --memory 1GB --batch-size 8 --zero-stages 0 3".split()


def main(argv):
    return cli.main(argv, more=[add_plan])


def build(units=33):
    layers = [keras.layers.Dense(units, "relu"), keras.layers.Dense(5)]
    return keras.Sequential([keras.Input((12,)), *layers], name="small")


def test_what_it_prints_and_writes(tmp_path, capsys):
    options = ["--arguments", '{"units": 65}', "--json", str(tmp_path / "plans.json"), "--png", str(tmp_path / "plans.png")]
    assert main(["plan", *OPTIONS, *options, "--flops", "1e15"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("small: 1.18 k parameters, 2 x 1.00 GB, batch 8, Adam\n")
    assert "strategy = tfdist.ShardedStrategy(" in captured.out and "1e+15 FLOPs" in captured.out
    assert "Confirmed by a dry run: memory " in captured.out and ", sent bytes equal (" in captured.out
    assert captured.err.splitlines()[0] == "tracing the model ..."
    told = json.loads((tmp_path / "plans.json").read_text())
    assert told["best"]["fits"] and told["best"]["python"] in captured.out
    assert (tmp_path / "plans.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_fits(capsys):
    options = [one if one != "1GB" else "1kB" for one in OPTIONS]
    assert main(["plan", *options, "--json", "-"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["best"] is None and all(one["missing_bytes"] > 0 and one["largest"] for one in told["candidates"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (OPTIONS[2:], "one of the arguments --model --config is required"),
        ([*OPTIONS, "--config", "gpt2-xl"], "not allowed with argument --model"),
        (["--model", "nowhere:build", *OPTIONS[2:]], "`model` must name a function of a module that can be imported"),
        (["--config", "gpt5", *OPTIONS[2:]], "`config` must be one of gpt2-xl"),
        (["--config", "gpt2-xl", "--sequence-length", "4096", *OPTIONS[2:]], "`sequence_length` must be at most 1024"),
        ([*OPTIONS, "--arguments", "units=3"], "`arguments` must be a JSON object"),
        ([*OPTIONS, "--memory", "many"], "`memory_per_device` must be a size in bytes"),
        ([*OPTIONS, "--devices", "0"], "argument --devices: must be a positive integer"),
        ([*OPTIONS, "--hardware", "abacus"], "`hardware` must be one of v100"),
        ([*OPTIONS, "--calibration", "none.json"], "`calibration` must be a file that can be read"),
        ([*OPTIONS, "--json", "no/where.json"], "argument --json: must be a file in a directory that exists"),
        ([*OPTIONS, "--compress", "zip"], "`gradient_compressions` must be"),
    ],
)
def test_what_is_refused(options, message, capsys):
    with pytest.raises(SystemExit) as error:
        main(["plan", *options])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
