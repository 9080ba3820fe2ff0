"""Two trees in turns: which runs when, the ratios, and what fails. The trees are a few lines instead of a benchmark."""

import pytest

from benchmarks import compare_trees

PROGRAM = """
import json, pathlib, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = pathlib.Path(words["--out"])
folder.mkdir(parents=True, exist_ok=True)
name = {name: words[f"--{name}s"] for name in ("kind", "model", "contender")}
record = {**name, "ranks": int(words["--ranks"]), **FIGURES[name["kind"]]}
with open(LOG, "a") as log:
    log.write(f"{TREE} {folder.name} {name['kind']}\\n")
with (folder / "results.jsonl").open("a") as file:
    file.write(json.dumps({"conditions": {}}) + "\\n" + json.dumps(record) + "\\n")
sys.exit(CODE)
"""


@pytest.fixture
def trees(tmp_path):
    """Returns a function that makes the trees, each with its figures by kind, and returns the arguments that compare them."""

    def make(before, after, code=0):
        for tree, figures in (("before", before), ("after", after)):
            (tmp_path / tree / "benchmarks").mkdir(parents=True)
            (tmp_path / tree / "benchmarks" / "__init__.py").touch()
            known = {"FIGURES": figures, "LOG": str(tmp_path / "log"), "TREE": tree, "CODE": code if tree == "after" else 0}
            head = "".join(f"{name} = {value!r}\n" for name, value in known.items())
            (tmp_path / tree / "benchmarks" / "run.py").write_text(head + PROGRAM)
        words = ["--contenders", "zero1", "--models", "small", "--ranks", "2", "--rounds", "2"]
        folders = {"before": tmp_path / "before", "after": tmp_path / "after", "out": tmp_path / "out"}
        return [*words, *(word for name, folder in folders.items() for word in (f"--{name}", str(folder)))]

    return make


def test_trees_take_turns_and_ratios_are_of_after_to_before(trees, tmp_path, capsys):
    before = {"speed": {"tokens_per_second": 100.0, "cpu_seconds_per_step": 0.5}, "memory": {"growth_bytes": 200}}
    after = {"speed": {"tokens_per_second": 110.0, "cpu_seconds_per_step": 0.4}, "memory": {"growth_bytes": 150}}
    assert compare_trees.main([*trees(before, after), "--kinds", "speed", "memory"]) == 0
    ran = (tmp_path / "log").read_text().split("\n")[:-1]
    in_round_0 = [f"{tree} 0 {kind}" for kind in ("speed", "memory") for tree in ("before", "after")]
    assert ran == [*in_round_0, *(f"{tree} 1 {kind}" for kind in ("speed", "memory") for tree in ("after", "before"))]
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith(("speed", "memory"))}
    assert "zero1 x2" in rows["speed"]
    assert "1.100 (1.10 .. 1.10)" in rows["speed"] and "0.800 (0.80 .. 0.80)" in rows["speed"]
    assert "0.750 (0.75 .. 0.75)" in rows["memory"]
    assert (tmp_path / "out" / "table.txt").exists()


@pytest.mark.parametrize(("figures", "code", "reason"), [({"error": "it died"}, 1, "it died"), ({}, 2, "ended with 2")])
def test_a_case_that_fails_in_one_tree(trees, figures, code, reason, capsys):
    assert compare_trees.main(trees({"speed": {"tokens_per_second": 100.0}}, {"speed": figures}, code)) == 1
    out = capsys.readouterr().out
    assert "failed: speed small zero1 x2, after: " in out and reason in out


def test_a_tree_must_be_a_checkout(tmp_path, capsys):
    with pytest.raises(SystemExit):
        compare_trees.parse_args(["--before", str(tmp_path), "--after", "."])
    assert "argument --before: must be a checkout" in capsys.readouterr().err


def test_defaults_are_those_of_the_suite(trees):
    words = trees({}, {})[8:]
    args = compare_trees.parse_args(words)
    assert (args.kinds, args.models, args.ranks, args.contenders) == (
        ["speed"],
        ["small", "wide"],
        [2],
        ["zero1", "zero2", "zero3"],
    )
    assert compare_trees.parse_args([*words, "--suite", "full"]).kinds == ["speed", "memory"]
