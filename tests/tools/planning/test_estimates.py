"""What a replica computes and sends under a candidate."""

import dataclasses

import keras
import pytest

from tfdist.tools.planning.candidate import Candidate
from tfdist.tools.planning.data_sheets import from_sheet
from tfdist.tools.planning.decoder import decoder_builder
from tfdist.tools.planning.estimates import Estimates
from tfdist.tools.planning.known_models import known_model
from tfdist.tools.planning.traced_model import trace

CONFIG = dataclasses.replace(
    known_model("llama3-8b"),
    num_layers=6,
    width=256,
    num_heads=4,
    num_key_value_heads=2,
    head_size=64,
    mlp_width=512,
    vocabulary_size=1000,
    max_sequence_length=32,
)


@pytest.fixture(scope="module")
def estimates():
    hardware = dataclasses.replace(from_sheet("h100"), operation_seconds=0.0)
    return Estimates(trace(decoder_builder(CONFIG)), 32, hardware, 8)


def test_what_the_model_can_be_cut_in(estimates):
    assert estimates.traced.block_pattern == "block"
    assert estimates.tensor_sizes(8) == [1, 2, 4, 8]
    assert estimates.most_stages == 9  # layers: embedding, six blocks, norm, head
    assert estimates.tokens_per_example == 32
    # Forward and backward: 6 for each parameter of a product and token, and attention's products.
    products = CONFIG.parameters - CONFIG.vocabulary_size * CONFIG.width
    attention = 12 * 6 * 256 * 32
    assert estimates.flops_per_example / 32 == pytest.approx(6 * products + attention, rel=0.02)


def test_parameters_are_divided_by_the_pipeline_and_by_tensor_ranks(estimates):
    whole = estimates.step(Candidate(0))
    assert whole.parameters == CONFIG.parameters and whole.parameter_bytes == 4 * CONFIG.parameters
    halves = estimates.step(Candidate(0, pipeline=2, schedule="1f1b", microbatches=4))
    assert CONFIG.parameters / 2 < halves.parameters < 0.51 * CONFIG.parameters  # the fullest rank's, with its norm
    assert halves.border_bytes == 32 / 4 * 32 * 256 * 4  # float32 of a microbatch
    assert 0.5 <= halves.stage_share < 0.7
    shared = estimates.step(Candidate(0, tensor=2))
    assert 0.5 <= shared.parameters / CONFIG.parameters < 0.55
    assert shared.tensor_bytes > 0 and shared.tensor_messages >= 4 * 6
    assert shared.forward < whole.forward
    of_all = Estimates(estimates.traced, 32, dataclasses.replace(estimates.hardware, sharing=2.0), 8)
    mean = of_all.step(Candidate(0, pipeline=2, schedule="1f1b", microbatches=4)).parameters
    assert mean == CONFIG.parameters / 2  # of devices that share a processor


def test_messages_are_packed(estimates):
    size = 4 * CONFIG.parameters
    reduced = estimates.step(Candidate(0, data=2)).messages
    assert size / (8 * 2**20) <= reduced <= 2 * size / (8 * 2**20) + 1
    gathered = estimates.step(Candidate(3, data=2)).messages
    assert reduced < gathered <= 6 * 9 + 3  # at most each layer alone


def test_the_stages_of_a_rank_are_taken_together(estimates):
    """The rank of the head has a light stage, too: the slowest stage twice would be more than it computes."""
    whole = estimates.step(Candidate(0, pipeline=2, schedule="1f1b", microbatches=4)).stage_share
    halves = estimates.step(Candidate(0, pipeline=2, schedule="interleaved", stages_per_rank=2, microbatches=4)).stage_share
    assert 0.25 <= halves < 0.35 and 0.5 <= whole < 0.7


def test_recomputation(estimates):
    assert 0.3 < estimates.step(Candidate(0, recompute=True)).recomputed < 1
    assert estimates.step(Candidate(0, pipeline=2, schedule="1f1b", microbatches=2, recompute=True)).recomputed == 1


def test_a_model_without_blocks():
    def build():
        return keras.Sequential([keras.Input((12,)), keras.layers.Dense(5), keras.layers.Dense(3)])

    estimates = Estimates(trace(build), 8, from_sheet("h100"), 8)
    assert estimates.traced.block_pattern is None and estimates.tokens_per_example == 1
    assert estimates.tensor_sizes(4) == [1] and estimates.most_stages == 2
