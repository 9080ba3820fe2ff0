"""Suggested plans: their bytes against the formulas, the rule against exhaustive choice, the table."""

import itertools

import keras
import pytest
from keras import layers, ops
from plan_models import chain, decoder, example_gpt, subclassed, with_raw_ops

from tfdist.extensions.tensor.plans import TensorPlan, resolve, suggest_plan, trace_model
from tfdist.extensions.tensor.plans.layer_shardings import layer_shardings
from tfdist.extensions.tensor.plans.suggest import BREAK_EVEN_VECTORS, _Ranks


def roles(plan):
    return {sharding.path.split("/")[-1]: sharding.role for sharding in plan.shardings}


def cut_of(plan, name):
    (found,) = (sharding for sharding in plan.shardings if sharding.path.split("/")[-1] == name)
    return found


WIDTH, SEQ = 128, 64


def large_gpt():
    return example_gpt(width=WIDTH, blocks=2, heads=4, seq_len=SEQ)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_example(ranks):
    plan = suggest_plan(large_gpt(), ranks, rows=3)
    assert plan.as_dict() == {
        "^token_embedding$": "vocab",
        r"^block_\d+_attention$": "column",
        r"^block_\d+_mlp_in$": "column",
        r"^block_\d+_mlp_out$": "row",
        "^logits$": "column",
    }
    part = (ranks - 1) / ranks
    activation = 3 * SEQ * WIDTH * 4  # bytes of three examples
    moved = {sharding.path: sharding.moved_bytes for sharding in plan.shardings}
    assert moved["token_embedding"] == 2 * activation * part  # all-reduce forward
    assert moved["block_0_attention"] == 4 * activation * part  # all-reduce forward and backward
    assert moved["block_0_mlp_in"] == moved["block_1_mlp_out"] == 2 * activation * part  # one of the two each
    assert moved["logits"] == (2 + 256 / WIDTH) * activation * part  # all-gather forward, all-reduce backward
    saved = {sharding.path: sharding.saved_bytes for sharding in plan.shardings}
    assert saved["token_embedding"] == 4 * 256 * WIDTH * part
    assert saved["block_0_attention"] == 4 * (4 * WIDTH**2 + 3 * WIDTH) * part  # the output's bias is whole
    assert saved["block_0_mlp_in"] == 4 * (4 * WIDTH**2 + 4 * WIDTH) * part
    assert saved["block_0_mlp_out"] == 4 * 4 * WIDTH**2 * part
    assert plan.saved_bytes == sum(saved.values()) and plan.moved_bytes == sum(moved.values())
    assert [sharding.is_paired for sharding in plan.shardings] == [False, False, True, True, False, True, True, False]


def test_the_plan_can_be_used_as_it_is():
    model = large_gpt()
    plan = suggest_plan(model, 2)
    assert isinstance(plan, TensorPlan)
    shardings = resolve(model, plan, 2)
    assert [(sharding.path, sharding.role) for sharding in shardings] == [
        (sharding.path, sharding.role) for sharding in plan.shardings
    ]
    paired = [sharding.is_paired for sharding in plan.shardings]
    assert [
        sharding.input_is_parallel or (sharding.role == "column" and not sharding.gather_output)
        for sharding in shardings
        if "attention" not in sharding.path
    ] == [flag for flag, sharding in zip(paired, plan.shardings, strict=True) if "attention" not in sharding.path]
    edited = {**plan.as_dict(), "^logits$": "replicate"}
    assert len(resolve(model, edited, 2)) == len(shardings) - 1


def test_the_plan_does_not_depend_on_the_batch():
    model = large_gpt()
    one, many = suggest_plan(model, 2), suggest_plan(model, 2, rows=100)
    assert one.as_dict() == many.as_dict()
    assert many.moved_bytes == 100 * one.moved_bytes


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("features, units", [(512, 1024), (1024, 512), (768, 768), (512, 2048), (2048, 512)])
def test_a_layer_alone_is_cut_the_way_that_moves_less(features, units, ranks):
    """By column where the output is larger: O + 2 I against 2 O + I."""
    x = keras.Input((features,))
    y = layers.Dense(units, name="alone")(layers.LayerNormalization()(x))
    model = keras.Model(x, ops.softmax(y))
    sharding = cut_of(suggest_plan(model, ranks), "alone")
    assert sharding.role == ("row" if units < features else "column")
    part = 4 * (ranks - 1) / ranks
    column, row = part * (units + 2 * features), part * (2 * units + features)
    assert sharding.moved_bytes == min(column, row) and not sharding.is_paired


def test_the_first_layer_needs_no_gradient_of_its_input():
    """Then a gather moves half of what a sum does, whatever the sizes."""
    x = keras.Input((2048,))
    sharding = cut_of(suggest_plan(keras.Model(x, ops.softmax(layers.Dense(512, name="first")(x))), 2), "first")
    assert (sharding.role, sharding.moved_bytes) == ("column", 512 * 4 / 2)


def test_the_break_even_of_the_note():
    def role(features, units):
        x = keras.Input((features,))
        y = layers.Dense(units, use_bias=False, name="alone")(layers.LayerNormalization()(x))
        return roles(suggest_plan(keras.Model(x, ops.softmax(y)), 2))["alone"]

    assert role(192, 192) == "replicate"  # in * out / (2 in + out) = 64
    assert role(194, 194) == "column"
    assert role(4096, 10) == "replicate"

    def pair(width, hidden):
        x = keras.Input((width,))
        y = layers.Dense(hidden, use_bias=False, name="up")(layers.LayerNormalization()(x))
        y = layers.Dense(width, use_bias=False, name="down")(y)
        return roles(suggest_plan(keras.Model(x, ops.softmax(y)), 2))

    assert pair(32, 128) == {"up": "replicate", "down": "replicate"}
    assert pair(32, 130) == {"up": "column", "down": "row"}


def test_a_small_head_is_cut_with_a_layer_before_it_only():
    alone = keras.Sequential(
        [keras.Input((784,)), layers.Dense(512, "relu"), layers.LayerNormalization(), layers.Dense(10, name="head")]
    )
    plan = suggest_plan(alone, 2)
    assert roles(plan)["head"] == "replicate"
    assert cut_of(plan, "head").reason == "saves 40.96 kB of state, 256 vectors move 272.38 kB"
    assert roles(suggest_plan(chain(512, 10, features=784), 2)) == {"dense_0": "column", "dense_1": "row"}


def test_a_chain_is_cut_in_pairs():
    assert list(roles(suggest_plan(chain(512, 512, 512, 512, features=512), 2)).values()) == ["column", "row"] * 2
    assert list(roles(suggest_plan(chain(512, 512, 512, features=512), 2)).values()) == ["column", "row", "column"]
    # The large ones make the pair, not the first ones.
    assert list(roles(suggest_plan(chain(48, 2048, 48, features=48), 2)).values()) == ["replicate", "column", "row"]


def net(graph, ranks, chosen):
    """What a whole plan is worth: the quantity that the suggestion maximizes."""
    weigh = _Ranks(ranks)
    layers_of = {known.layer: known for known in graph.layers}
    return sum(weigh.worth(layers_of[sharding.layer], sharding) for sharding in layer_shardings(graph, chosen))


@pytest.mark.parametrize("features", [8, 320])
@pytest.mark.parametrize(
    "units", [(300, 200, 400), (512, 64, 512, 64), (256, 256, 256, 256), (100, 700, 300, 20), (512, 512, 512, 512, 512)]
)
def test_no_other_plan_of_a_chain_is_worth_more(units, features):
    graph = trace_model(model := chain(*units, features=features))
    plan = suggest_plan(model, 2)
    suggested = {
        known.layer: sharding.role
        for known, sharding in zip(graph.layers, plan.shardings, strict=True)
        if sharding.role != "replicate"
    }
    best = 0
    for choice in itertools.product(("column", "row", "replicate"), repeat=len(units)):
        chosen = {known.layer: role for known, role in zip(graph.layers, choice, strict=True) if role != "replicate"}
        best = max(best, net(graph, 2, chosen))
    assert net(graph, 2, suggested) == pytest.approx(best)


def test_nested_blocks_and_gates():
    plan = suggest_plan(decoder(width=256), 2)
    assert roles(plan) | {"position": None} == {
        "token": "replicate",  # 30 rows: less than the positions that it would be summed for
        "position": None,
        "attention": "column",
        "gate": "column",
        "up": "column",
        "down": "row",
        "head": "replicate",
    }
    assert all(sharding.is_paired for sharding in plan.shardings if "mlp" in sharding.path)
    assert r"^decoder/block_\d+/mlp/gate$" in plan.as_dict()


def test_sizes_that_are_not_divisible_stay_whole():
    plan = suggest_plan(large_gpt(), 3)
    assert roles(plan)["token_embedding"] == "vocab"
    assert cut_of(plan, "block_0_attention").reason == "num_heads 4: not divisible by 3"
    assert cut_of(plan, "logits").reason == "units 256, input features 128: not divisible by 3"
    # One of the two sizes is enough.
    x = keras.Input((512,))
    model = keras.Model(x, ops.softmax(layers.Dense(1001, name="alone")(layers.LayerNormalization()(x))))
    assert roles(suggest_plan(model, 2)) == {"alone": "row"}


def test_an_equation_without_an_axis_to_cut():
    x = keras.Input((8,))
    plan = suggest_plan(keras.Model(x, layers.EinsumDense("ab,b->ab", 8, name="scale")(x)), 2)
    assert plan.shardings[0].reason == "its equation has no axis to shard"


def test_one_rank():
    plan = suggest_plan(large_gpt(), 1)
    assert set(roles(plan).values()) == {"replicate"}
    assert {sharding.reason for sharding in plan.shardings} == {"there is one rank"}
    assert resolve(large_gpt(), plan, 1) == []


def test_frozen_layers_have_no_gradient_and_no_moments():
    """They save a quarter: this Dense is worth sharding only if it is trained."""
    model = keras.Sequential(
        [keras.Input((256,)), layers.LayerNormalization(), layers.Dense(256, name="alone"), layers.Softmax()]
    )
    assert roles(suggest_plan(model, 2))["alone"] == "column"
    model.get_layer("alone").trainable = False
    assert roles(suggest_plan(model, 2))["alone"] == "replicate"


def test_what_cannot_be_cut_or_followed_is_said():
    plan = suggest_plan(with_raw_ops(), 2)
    assert "raw cannot be followed (ValueError" in str(plan)

    def tied(made, x):
        return ops.matmul(made[0](x), ops.transpose(made[0].embeddings))

    model = subclassed(tied, layers.Embedding(800, 64, name="e"), example=ops.ones((2, 3), "int32"))
    plan = suggest_plan(model, 2)
    assert [(sharding.role, sharding.reason) for sharding in plan.shardings] == [
        ("replicate", "its weights are used outside of its calls too")
    ]


def test_layers_of_one_path_get_one_role():
    inner = [keras.Sequential([keras.Input((512,)), layers.Dense(512, name="same")], name="twin") for _ in range(2)]
    model = subclassed(lambda made, x: made[1](ops.relu(made[0](x))), *inner, example=ops.ones((2, 512)))
    paths = [known.path for known in trace_model(model).layers]
    assert paths[0] == paths[1]
    plan = suggest_plan(model, 2)
    assert set(roles(plan).values()) == {"replicate"}
    assert plan.shardings[0].reason == "it has the path of another layer that is sharded in another way"


def test_patterns_are_general_only_where_all_agree():
    first = layers.Dense(256, name="layer_0")
    x = keras.Input((256,))
    y = layers.LayerNormalization(name="layer_1")(first(x))
    plan = suggest_plan(keras.Model(x, ops.softmax(layers.Dense(256, name="layer_2")(y))), 2)
    assert list(plan) == ["^layer_0$", "^layer_2$"]  # `layer_\d+` would match the norm


TABLE = """\
Suggested sharding over 2 tensor ranks
saved: parameter bytes that each rank no longer holds; gradients and optimizer state come on top
moved: bytes through each rank in a training step of 1 example per replica, forward and backward
layer          kind   role       paired      saved    moved
----------------------------------------------------------------------------------------------------------------
chain/dense_0  Dense  column     yes     131.58 kB      0 B  its output stays local
chain/dense_1  Dense  row        yes     131.07 kB  1.02 kB  its input is local
chain/dense_2  Dense  replicate                0 B      0 B  saves 10.24 kB of state, 256 vectors move 136.19 kB
----------------------------------------------------------------------------------------------------------------
together                                 262.66 kB  1.02 kB  of 533.52 kB parameters"""


def test_the_table():
    model = keras.Sequential(
        [
            keras.Input((256,)),
            layers.Dense(256, "relu", name="dense_0"),
            layers.Dense(256, name="dense_1"),
            layers.LayerNormalization(),
            layers.Dense(5, name="dense_2"),
        ],
        name="chain",
    )
    text = str(suggest_plan(model, 2))
    assert text == TABLE
    assert "of 4 examples per replica" in str(suggest_plan(model, 2, rows=4))


@pytest.mark.parametrize("rows", [0, -1, 1.0, True, "3"])
def test_bad_rows(rows):
    with pytest.raises(ValueError, match="`rows` must be a positive integer.*Received: rows="):
        suggest_plan(chain(4), 2, rows=rows)


def test_bad_models_and_sizes():
    with pytest.raises(ValueError, match="`tensor_parallel_size` must be a positive integer"):
        suggest_plan(chain(4), 0)
    with pytest.raises(ValueError, match="`model` must hold a layer that can be sharded"):
        suggest_plan(keras.Sequential([keras.Input((4,)), layers.LayerNormalization()]), 2)
    with pytest.raises(ValueError, match="`model` must be built"):
        suggest_plan(keras.Sequential([layers.Dense(4)]), 2)
    assert BREAK_EVEN_VECTORS == 256  # the note's numbers and the page's stand on it


# Branches


def branching(*heads, width=256):
    """`up` and `gate` widen, `left` narrows their sum, `right` the gate alone; `heads` say what more is done with the gate."""
    x = keras.Input((width,))
    y = layers.LayerNormalization()(x)
    up, gate = (layers.Dense(2 * width, "relu", name=name)(y) for name in ("up", "gate"))
    left = layers.Dense(width, name="left")(layers.Add()([up, gate]))
    right = layers.Dense(width, name="right")(layers.Dropout(0.1)(gate))
    return keras.Model(x, [left, right, *(head(gate) for head in heads)])


def pairs(plan):
    return {sharding.path: (sharding.role, sharding.is_paired) for sharding in plan.shardings}


def test_a_branch_is_sharded_as_a_whole():
    """Two layers by column feed two by row, one of them both: all four are paired, and nothing is moved between."""
    model = branching()
    plan = suggest_plan(model, 2)
    column, row = ("column", True), ("row", True)
    assert pairs(plan) == {"up": column, "gate": column, "left": row, "right": row}
    assert [(x.gather_output, x.input_is_parallel) for x in resolve(model, plan, 2)] == [(False, False)] * 2 + [(False, True)] * 2
    part = 4 * 256 / 2
    assert {x.path: x.moved_bytes for x in plan.shardings} == dict.fromkeys(("up", "gate", "left", "right"), 2 * part)


def test_a_branch_that_needs_the_whole_parts_all_that_hangs_together():
    """The gate is gathered for a softmax, and so for both layers behind it: `up` is added to it, and is gathered, too."""
    model = branching(ops.softmax)
    plan = suggest_plan(model, 2)
    assert not any(is_paired for _, is_paired in pairs(plan).values()), str(plan)
    assert pairs(plan)["up"] == pairs(plan)["gate"] == ("column", False)
    shardings = {x.path: x for x in resolve(model, plan, 2)}
    assert shardings["up"].gather_output and shardings["gate"].gather_output
    assert not shardings["left"].input_is_parallel and not shardings["right"].input_is_parallel


def test_branches_apart_are_sharded_apart():
    """One branch of a model needs its hidden tensor whole, the other does not."""
    x = keras.Input((256,))
    y = layers.LayerNormalization()(x)
    one = layers.Dense(512, "relu", name="one")(y)
    two = layers.Dense(512, "relu", name="two")(y)
    outputs = [layers.Dense(256, name="one_down")(one), layers.Dense(256, name="two_down")(layers.LayerNormalization()(two))]
    plan = suggest_plan(keras.Model(x, outputs), 2)
    assert pairs(plan)["one"] == ("column", True) and pairs(plan)["one_down"] == ("row", True)
    assert not pairs(plan)["two"][1] and not pairs(plan)["two_down"][1]


def test_a_row_that_is_called_in_two_branches_takes_both_inputs_alike():
    """Shared: its one input is local, its other is whole, so that both are whole."""
    x = keras.Input((256,))
    y = layers.LayerNormalization()(x)
    shared = layers.Dense(256, name="shared")
    up = layers.Dense(512, "relu", name="up")(y)
    model = keras.Model(x, [shared(up), shared(ops.concatenate([x, x], -1))])
    plan = suggest_plan(model, 2)
    assert not pairs(plan)["up"][1] and not pairs(plan)["shared"][1]
    assert not next(x for x in resolve(model, {"up": "column", "shared": "row"}, 2) if x.path == "shared").input_is_parallel
