"""Functions of the batch in every place and way of training, beside one device: see `functions_of_the_batch`.

Several functions of one way run in one trace, each with a layer of its own; a failure names those that are wrong. By default
every second loss, and all else, runs once: ways, forms of batches and stages take turns.
"""

import itertools

import pytest
from grids import exhaustive

from tests.programs.rows import ways_of_training
from tests.programs.rows.functions_of_the_batch import FUNCTIONS
from tests.programs.rows.ways_of_training import FORMS, PIPELINES, WAYS, Case, applies, assert_same, moved, under

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(300), pytest.mark.usefixtures("float64")]

TOGETHER = 12  # functions in one trace
ALONE = ("nine_hundred_terms", "nine_hundred_terms_of_a_root")

# Ways that the default cases take in turns: a loss is the place where most depends on a function.
TURNS = {
    "loss": (
        "step", "fit", "returned", "compute_loss", "metric", "add_loss", "assigned", "tracker", "statistic", "evaluate",
    ),
    "gradient": ("gradient", "loop"),
    "clipped gradient": ("gradient",),
    "layer": ("layer",),
    "statistic": ("assigned", "statistic"),
}  # fmt: skip
DEFAULT_FORMS = ("uneven", "coincide", "empty", "static", "coincide_dynamic", "uneven", "coincide_batch", "even")
DEFAULT_STAGES = (3, 0, 3, 0, 3, 1, 0, 3, 2)
WITH_THE_MEAN_OF_A_GRADIENT = (
    *("mean_of_the_gradient", "sum_and_the_mean_of_the_gradient", "largest_row_and_the_mean_of_the_gradient"),
    *("largest_row_times_the_mean_of_the_gradient", "rows_by_the_gradient_over_rows"),
)

# Losses of a loop that are no shares as they stand, as docs/training.md says: plain means, sums for which nothing is agreed on,
# what stands beside penalties; and gradients of such losses.
UNDIVIDED_WITHIN = (
    *WITH_THE_MEAN_OF_A_GRADIENT,
    *("norm_of_the_gradient", "norm_of_the_gradient_of_a_root", "norm_of_the_gradient_of_pairs", "norm_over_maxima"),
    *("rows_times_the_norm_of_the_gradient", "largest_and_the_norm_of_its_gradient"),
    *("largest_row_times_the_norm_of_the_gradient", "rows_by_the_gradient", "root_of_rows_scaled_by_the_gradient"),
    "largest_row_and_a_choice_of_the_gradient",
)
UNDIVIDED = (
    *(f.name for f in FUNCTIONS.values() if f.group == "means"),
    *("sum_by_a_constant", "sum_by_nothing", "half_a_sum_of_squares", "sum_over_the_root_of_rows"),
    *("sum_and_mean", "mean_root_and_penalty", "penalty_times_the_mean", "gradient_of_a_root", *UNDIVIDED_WITHIN),
)

# A Keras loss in a branch of a loop of one's own has sent something there: of functions of it a step tells.
NO_SHARES = {"loop": (*UNDIVIDED, "keras_losses_in_branches"), "loop_divided": (*UNDIVIDED_WITHIN, "keras_losses_in_branches")}

# As many columns as a rank has rows, or parts of the kernel: a constant of that size may be one of rows. Nothing is made again
# of it, which is told.
COINCIDING = {("smoothed_along_rows", "seven"), ("smoothed_along_rows", "coincide")}
COINCIDING_IN_LOOPS = {  # where sizes are known to the trace
    ("smoothed_along_rows", "uneven"),
    ("smoothed_along_rows", "coincide_dynamic"),
    ("hardest_two_rows", "coincide_dynamic"),
}

# What an eager step warns of: rows that meet, numbers of rows that Python has read. What fails on few rows fails there first.
NOT_EAGERLY = (
    *(f.name for f in FUNCTIONS.values() if f.group == "meeting" and f.exact),
    *(
        "rows_times_the_norm_of_the_gradient",
        "norm_of_the_gradient_of_pairs",
        "softmax_weights",
        "softmax_over_the_rows",
        "log_softmax_over_the_rows",
        "whitened",
        "product_of_the_rows",
    ),
    *("sum_over_the_root_of_rows", "mahalanobis", "eigenvalues"),
)


def members(kind, way, form):
    """The functions that a step must be right about, in that way."""
    return [
        f.name
        for f in FUNCTIONS.values()
        if f.kind == kind
        and f.exact
        and f.name not in ALONE
        and applies(f, way, form)
        and f.name not in NO_SHARES.get(way, ())
        and (f.name, form) not in COINCIDING
        and not (way in ("loop", "loop_divided") and (f.name, form) in COINCIDING_IN_LOOPS)
        and not (way == "eager" and f.name in NOT_EAGERLY)
    ]


def parts(names, size=TOGETHER):
    count = -(-len(names) // size)
    return [tuple(names[place::count]) for place in range(count)]


def default_cases():
    """Every second loss and all else once, in parts that go through all kinds of functions."""
    forms, stages = itertools.cycle(DEFAULT_FORMS), itertools.cycle(DEFAULT_STAGES)
    for kind, ways in TURNS.items():
        left = [f.name for f in FUNCTIONS.values() if f.kind == kind and f.exact and f.name not in ALONE]
        left = left[:: 2 if kind == "loss" else 1]
        for way in itertools.cycle(ways):
            form, stage = next(forms), next(stages)
            fitting = [name for name in left if name in members(kind, way, form)]
            if fitting:
                taken = parts(fitting)[0]
                left = [name for name in left if name not in taken]
                yield Case(taken, way, form), stage, 4 if (form, stage) == ("empty", 3) else 2
            if not left:
                break
    yield Case(ALONE, "step", "uneven"), 0, 2
    yield Case(("roots_of_stacked_tasks", "mean_of_stacked_tasks", "largest_task", "covariance"), "step", "seven"), 3, 2
    yield Case(("rmse", "dice", "centred_rows", "in_batch_negatives"), "step", "uneven", "adam"), 2, 4
    # A rank without rows: the derivative by what is of weights is the mean of nothing.
    yield from ((Case(("penalty_times_the_mean", "mean_root_and_penalty"), "add_loss", "empty"), stage, 2) for stage in (0, 3))
    seconds = ("norm_of_the_gradient", "gradient_of_a_root", "norm_of_the_gradient_of_a_root")
    yield Case(seconds, "fit", "uneven"), 0, 2
    yield Case(("penalty_times_the_mean", *seconds), "fit", "empty"), 3, 2
    yield Case(seconds, "metric", "uneven"), 3, 2
    yield Case(seconds, "assigned", "coincide"), 3, 2
    # Gradients that go back to rows: at stages 0 to 2 the ranks agree on the sum, at stage 3 it is gathered.
    scaled = ("rows_times_the_norm_of_the_gradient", "largest_row_times_the_norm_of_the_gradient")
    scaled = (*scaled, "rows_by_the_gradient", "root_of_rows_scaled_by_the_gradient")
    yield from ((Case(scaled, way, "uneven"), stage, 2) for way, stage in (("assigned", 0), ("assigned", 3), ("step", 3)))
    # Linear in a gradient, beside sums and maxima or alone, as losses and as logs.
    ways = (("step", 0), ("fit", 3), ("compute_loss", 3), ("evaluate", 3))
    yield from ((Case(WITH_THE_MEAN_OF_A_GRADIENT, way, "uneven"), stage, 2) for way, stage in ways)
    # What goes back to rows that were gathered sends, and a tape goes back through that.
    yield from ((Case(("norm_of_the_gradient_of_pairs", "norm_over_maxima"), way, "uneven"), 0, 2) for way in ("step", "fit"))
    # Their sum, in which a gradient meets the number of the second that has been sent.
    yield Case(("gradient_or_the_largest", "largest_row_and_a_choice_of_the_gradient"), "fit", "uneven"), 3, 2
    yield Case(("predictions_and_targets", "pairs_by_keras", "hardest_of_a_class", "scan_of_tasks"), "step", "coincide"), 3, 2
    yield Case(("masked_mean", "flooding", "softmax_weights"), "accumulated", "uneven"), 3, 2
    yield Case(("rmse", "where_of_the_mean", "centred_rows"), "scaled", "uneven"), 0, 2
    yield Case(("log_of_the_mean", "dice", "standardised_rows"), "recomputed", "uneven"), 3, 2
    yield (
        Case(("rmse", "dice", "covariance", "max_of_the_rows", "hinge_at_the_mean", "two_views"), "loop_divided", "uneven"),
        3,
        2,
    )
    yield Case(("rmse", "of_checked_labels"), "fit", "coincide"), 0, 2  # a hang, where ranks' assertions wait for each other's
    by_keras = ("keras_sum_of_means", "keras_cosine_of_columns", "keras_mean_over_columns", "keras_sum_of_pairs")
    others = (*by_keras, "mean_of_integers", "logsumexp_of_pairs")
    yield from ((Case(others, way, "uneven"), stage, 2) for way, stage in (("step", 3), ("fit", 0)))
    # What the number of replicas divides counts on a rank without rows, too, and is no number of rows where a rank has as many.
    divided = ("rmse", "mean_of_rows", "in_batch_negatives", "from_the_last_row", "neighbours")
    yield from ((Case(divided, "loop_divided", form), stage, 2) for form, stage in (("empty", 0), ("coincide_dynamic", 3)))
    counted_once = ("rmse", "dice_of_classes", "where_of_the_mean", "mean_and_root", "mean_of_selected_rows", "centred_rows")
    yield Case((*counted_once, "cosine_of_the_batch", "neighbours"), "loop", "uneven"), 3, 2
    yield Case(("rmse", "tversky", "cond_of_the_mean", "weighted_by_exponentials"), "eager", "coincide"), 0, 2
    yield Case(("spectrum_of_the_mean",), "eager", "uneven"), 1, 2
    yield Case(("pairs_of_complex_rows", "spectrum_of_the_mean"), "step", "empty"), 3, 2
    yield (
        Case(("masked_mean", "correlation_of_moments", "loop_on_the_mean", "custom_gradient_of_the_mean"), "eager", "empty"),
        3,
        2,
    )


def exhaustive_cases():
    """All functions in each way, stages and forms in turns; in steps, and as changes of gradients and in layers, in all forms, at
    stage 0 or 3."""
    forms, stages, ends = itertools.cycle(FORMS), itertools.cycle(range(4)), itertools.cycle((0, 3))
    for way, (_, kinds) in WAYS.items():
        if way in PIPELINES:
            continue
        for kind in kinds:
            every = way in ("step", "gradient", "layer")
            for form in FORMS if every else (next(forms),):
                for taken in parts(members(kind, way, form)):
                    stage = next(ends if every else stages)
                    yield Case(taken, way, form), stage, 4 if form == "empty" and stage % 2 else 2
            next(ends)  # so that a form's parts change stages from kind to kind, and forms stand at other stages


def named(case):
    return str(case) if not isinstance(case, Case) else f"{case.way}-{case.form}-{case.functions[0]}-{len(case.functions)}"


@pytest.mark.parametrize(
    ("case", "zero_stage", "devices"), [*default_cases(), *itertools.starmap(exhaustive, exhaustive_cases())], ids=named
)
def test_it_is_one_device(case, zero_stage, devices):
    assert_same(case, zero_stage, devices)


@pytest.mark.parametrize(
    "name",
    [name if name == "python_function_of_rows" else exhaustive(name) for name in FUNCTIONS if FUNCTIONS[name].group == "told"],
)
def test_what_no_graph_tells(name):
    """Is right or says so."""
    case = Case((name,), "step", "uneven")
    if not under(case, 0)[1]:
        assert_same(case, 0)


@pytest.mark.parametrize("name", [name if name == "rolled_rows" else exhaustive(name) for name in NOT_EAGERLY])
def test_what_an_eager_step_cannot(name):
    """Is right or says so."""
    case = Case((name,), "eager", "uneven")
    if not under(case, 0)[1]:
        assert_same(case, 0)


@pytest.mark.parametrize("form", [exhaustive(form) for form in FORMS])
def test_functions_train(form):
    """On one device each function moves its weights, or there would be nothing to compare."""
    for kind in ("loss", "gradient", "clipped gradient", "layer"):
        way = next(way for way, (_, kinds) in WAYS.items() if kind in kinds and way != "loop")
        # One norm is clipped for all: few, or each would move little.
        for taken in parts(members(kind, way, form), 3 if kind == "clipped gradient" else TOGETHER):
            still = {name: by for name, by in moved(Case(taken, way, form)).items() if not by > 1e-3}
            assert not still, ways_of_training.FORMS[form]
