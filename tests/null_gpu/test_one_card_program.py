"""`python -m benchmarks.one_card` on a null GPU: what a person with a card will run begins, ends and counts the GPU's memory."""

import json

import pytest

from tests.null_gpu.running import Machine

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]


def test_the_parts_that_need_no_numbers(null_gpus, tmp_path):
    words = ["-m", "benchmarks.one_card", "--quick", "--parts", "memory", "cost", "overlap", "--out", str(tmp_path)]
    ended = null_gpus(Machine(1, bytes=2 << 30), words, 1, 580)
    assert ended.codes == [0], ended.outputs[0][-3000:]
    head, *records = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert head["data"]["card"] == "Null GPU" and head["data"]["compute_capability"]
    assert [(record["part"], record["status"]) for record in records] == [
        *[("memory", "holds")] * 2,
        *[("cost", "holds")] * 3,
        ("overlap", "holds"),
    ]
    stage_3, stage_0 = (record["data"] for record in records[:2])
    for found in (stage_3, stage_0):  # each part of the card counts by itself
        assert len(found["peak_bytes_by_rank"]) == 2
        assert found["formula_bytes"] < found["peak_bytes"] <= found["at_most_bytes"]
    assert stage_3["rest_bytes"] == pytest.approx(stage_0["rest_bytes"] / 2, rel=0.05)
    # A null GPU has no profiler: the program says so, and looks at the host.
    assert "no streams of the GPU" in records[-1]["summary"] and records[-1]["data"]["messages_ms"] > 0


SIZES = "--layers 8 --width 16 --sequence-length 8 --batch-size 4 --rounds 1 --steps 1 --no-torch".split()


@pytest.mark.parametrize(
    "words",
    [
        ["benchmarks.pipeline_zero", "--layers", "4", "--width", "16", "--steps", "1", "--logical-gpus", "4"],
        ["benchmarks.pipeline", *SIZES, "--ranks", "2", "--microbatches", "2", "--schedules", "1f1b", "--logical-gpus", "2"],
        # Of its contenders Keras on one device compiles its steps with XLA, whose constants and graphs the driver must have.
        ["benchmarks.keras_workflow", "--blocks", "1", "--width", "48", "--rounds", "1", "--stages", "3", "--logical-gpus", "2"],
    ],
    ids=lambda words: words[0].rpartition(".")[2],
)
def test_benchmarks_take_parts_of_a_gpu(null_gpus, words):
    ended = null_gpus(Machine(1, bytes=2 << 30), ["-m", *words], 1, 500)
    assert ended.codes == [0], ended.outputs[0][-3000:]
    assert "FAILED" not in ended.outputs[0] and not ended.log.calls()  # TensorFlow's ring, not NCCL
    assert ended.log.of_kind("product")  # the GPU was used


def test_without_a_gpu_the_program_says_what_to_do(null_gpus, tmp_path):
    ended = null_gpus(Machine(0), ["-m", "benchmarks.one_card", "--quick", "--out", str(tmp_path)], 1, 200)
    assert ended.codes == [1]
    assert "there is none" in ended.outputs[0] and "--device cpu" in ended.outputs[0]
