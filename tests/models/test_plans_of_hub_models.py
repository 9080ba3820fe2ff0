"""What is suggested for KerasHub's models: attentions by heads, MLPs in pairs, tables by rows; and what is said of the rest."""

import keras
import pytest
from grids import exhaustive
from training import one_device, strategy_for

from tests.models import families, more_families
from tests.models.ways import everything_sharded, suggested_where_links_are_fast, train, with_lora
from tests.parity.comparison import assert_same_tree
from tfdist.extensions.tensor.plans import resolve, suggest_plan


def block_of(plan, part):
    """Returns {name in the block: (role, is it paired)} of the layers whose path holds `part`."""
    return {x.path.split("/")[-1]: (x.role, x.is_paired) for x in plan.shardings if part in f"{x.path}/"}


def wide(family):
    """A family in which layers are worth sharding."""
    models = families.hub().models
    sizes = {"vocabulary_size": 300, "num_layers": 2, "hidden_dim": 256, "intermediate_dim": 512}
    return {
        "GPT-2": lambda: models.GPT2Backbone(**sizes, num_heads=4, max_sequence_length=16),
        "Llama": lambda: models.LlamaBackbone(**sizes, num_query_heads=4, num_key_value_heads=2),
        "Gemma": lambda: models.GemmaBackbone(**sizes, num_query_heads=4, num_key_value_heads=1, head_dim=64),
        "BERT": lambda: models.BertBackbone(**sizes, num_heads=4, max_sequence_length=16),
        "T5": lambda: models.T5Backbone(**sizes, num_heads=4),
        "ViT": lambda: models.ViTBackbone((32, 32, 3), 8, num_layers=2, num_heads=4, hidden_dim=256, mlp_dim=512),
    }[family]()


PAIR_OF_DENSE = {"feedforward_intermediate_dense": ("column", True), "feedforward_output_dense": ("row", True)}
EXPECTED = {
    "GPT-2": ("transformer_layer_1/", {"self_attention": ("column", False), **PAIR_OF_DENSE}),
    "Llama": (
        "transformer_layer_1/",
        {"self_attention": ("column", False), **PAIR_OF_DENSE, "feedforward_gate_dense": ("column", True)},
    ),
    "Gemma": (
        "decoder_block_1/",
        {
            "attention": ("column", False),
            "ffw_gating": ("column", True),
            "ffw_gating_2": ("column", True),
            "ffw_linear": ("row", True),
        },
    ),
    "BERT": ("transformer_layer_1/", {"self_attention_layer": ("column", False), **PAIR_OF_DENSE}),
    "T5": (
        "transformer_decoder_layer_1/",
        {
            "self_attention": ("column", False),
            "cross_attention": ("column", False),
            "input_projector": ("column", True),
            "gate_projector": ("column", True),
            "output_projector": ("row", True),
        },
    ),
    "ViT": ("transformer_block_2/", {"mha": ("column", False), "dense_1": ("column", True), "dense_2": ("row", True)}),
}


@pytest.mark.parametrize("family", [family if family != "T5" else exhaustive(family) for family in EXPECTED])
def test_what_is_suggested(family):
    plan = suggest_plan(wide(family), 2)
    assert not [note for note in plan.notes if "cannot be followed" in note], plan.notes
    part, expected = EXPECTED[family]
    assert block_of(plan, part) == expected, str(plan)
    if family != "ViT":
        assert next(x for x in plan.shardings if x.path.endswith("token_embedding")).role == "vocab"
    assert plan.saved_bytes > 0.4 * plan.parameter_bytes, str(plan)


def test_heads_of_keys_and_values_may_be_fewer_than_the_ranks():
    plan = suggest_plan(wide("Llama"), 4)
    assert block_of(plan, "transformer_layer_1/")["self_attention"] == ("column", False)
    half, quarter = (next(x for x in suggest_plan(wide("Llama"), n).shardings if "self_attention" in x.path) for n in (2, 4))
    square = 4 * 256 * 256  # bytes of the projection of the queries, and of the output's
    assert half.saved_bytes == square + square // 2  # queries and output, and halves of keys and values
    assert quarter.saved_bytes == 2 * square * 3 // 4  # keys and values are whole


@pytest.mark.parametrize("name", ["Qwen3", "Gemma3", "Llama3", "Bart"])
def test_attentions_of_more_models_are_sharded_by_heads(name):
    model = more_families.build(name)
    with strategy_for(2, 0, tensor_parallel_size=2).scope():
        plan = suggested_where_links_are_fast(model)
    attentions = [x for x in plan.shardings if x.path.endswith(("attention", "attention_layer"))]
    assert len(attentions) >= 2 and {x.role for x in attentions} == {"column"}, str(plan)
    assert {x.reason for x in attentions} == {"heads"}


def test_heads_that_do_not_divide():
    plan = suggest_plan(wide("Gemma"), 8)
    (attention, *_) = (x for x in plan.shardings if x.path.endswith("attention"))
    assert (attention.role, attention.reason) == ("replicate", "num_query_heads 4: not divisible by 8")
    with pytest.raises(ValueError, match="must divide the num_query_heads"):
        resolve(wide("Gemma"), {"attention$": "column"}, 8)


def grouped(key_value_heads, **options):
    def builds(_):
        backbone = families.gemma_backbone(key_value_heads, **options)
        return families.hub().models.GemmaCausalLM(backbone, preprocessor=None)

    return builds


def llama_of_one_head(_):
    sizes = {"num_query_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True}
    backbone = families.hub().models.LlamaBackbone(**families.decoder_sizes(), **sizes)
    return families.hub().models.LlamaCausalLM(backbone, preprocessor=None)


def causal(name, **options):
    def builds(_):
        models = families.hub().models
        backbone = getattr(models, f"{name}Backbone")(**families.decoder_sizes(), **options)
        return keras.Model(backbone.input, keras.layers.Dense(families.VOCABULARY, name="head")(backbone.output))

    return builds


GROUPED = {"num_query_heads": 4, "num_key_value_heads": 2}
VARIANTS = {
    "Gemma, 2 heads of keys, soft caps, windows": grouped(
        2, use_sliding_window_attention=True, sliding_window_size=3, attention_logit_soft_cap=5.0, final_logit_soft_cap=3.0
    ),
    "Llama, 1 head of keys": llama_of_one_head,
    "Mistral": causal("Mistral", **GROUPED, sliding_window=3),
    "Qwen": causal("Qwen", **GROUPED),
    "Phi3": causal("Phi3", **GROUPED),
    "OPT": causal("OPT", num_heads=4, max_sequence_length=families.LENGTH, dropout=0.0),
}


@pytest.mark.parametrize(
    ("variant", "ranks"),
    [exhaustive(name, 2) for name in VARIANTS] + [exhaustive("Llama, 1 head of keys", 4), exhaustive("Mistral", 4)],
)
@pytest.mark.as_traced
def test_variants_are_one_device(variant, ranks, monkeypatch):
    def both(builds):
        monkeypatch.setitem(families.FAMILIES, "Llama", lambda: builds("Llama"))
        return everything_sharded("Llama")

    builds = VARIANTS[variant]
    expected = train(one_device(), "Llama", builds)
    strategy = strategy_for(ranks, 0, tensor_parallel_size=ranks)
    found = train(strategy, "Llama", lambda _: both(builds))
    assert_same_tree(found, expected, variant)


def test_factors_of_a_sharded_model_are_saved_and_loaded(tmp_path):
    """As KerasHub saves them, alone, between a sharded model and one of one device."""
    path, inputs = str(tmp_path / "it.lora.h5"), families.data("GPT-2")[0]
    keras.utils.set_random_seed(3)
    with strategy_for(2, 0, tensor_parallel_size=2).scope():
        sharded = with_lora("GPT-2", everything_sharded)
    expected = sharded.predict(inputs, batch_size=8, verbose=0)
    sharded.backbone.save_lora_weights(path)
    keras.utils.set_random_seed(3)
    plain = families.FAMILIES["GPT-2"]()
    plain.backbone.load_lora_weights(path)
    assert_same_tree(plain.predict(inputs, batch_size=8, verbose=0), expected)
    for layer in sharded._flatten_layers():
        if getattr(layer, "lora_enabled", False):
            layer.lora_kernel_b.assign(keras.ops.zeros(layer.lora_kernel_b.shape))
    sharded.backbone.load_lora_weights(path)
    assert_same_tree(sharded.predict(inputs, batch_size=8, verbose=0), expected)


def test_a_cache_within_a_rank_is_refused():
    strategy = strategy_for(2, 0, tensor_parallel_size=2)
    with strategy.scope():
        model = everything_sharded("GPT-2")
    tokens = families.data("GPT-2")[0]["token_ids"][:2]
    cache = keras.ops.zeros((2, 2, 2, families.LENGTH, 4, 4))
    with pytest.raises(NotImplementedError, match="Generate outside `strategy.run`"):
        strategy.run(lambda: model.call_with_cache(tokens, cache, 0))


def test_generation_of_a_sharded_model_is_that_of_one_device():
    """`generate` works outside replicas, where the layers are whole."""
    x = families.data("GPT-2")[0]
    prompts = {"token_ids": x["token_ids"][:2], "padding_mask": (x["padding_mask"][:2] * 0) + [1, 1, 0, 0, 0, 0]}

    def generated(strategy, builds):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = builds("GPT-2")
            model.compile(sampler="greedy")
        return model.generate(dict(prompts), stop_token_ids=None)["token_ids"]

    expected = generated(one_device(), lambda family: families.FAMILIES[family]())
    found = generated(strategy_for(2, 0, tensor_parallel_size=2), everything_sharded)
    assert (found == expected).all()
