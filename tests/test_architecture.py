"""The layers of the code, enforced: what may import what, and where private and raw names may stand."""

import ast
import functools
import inspect
import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest

import tfdist

ROOT = pathlib.Path(tfdist.__file__).parent


NAMES = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.rglob("*.py"))]


@functools.cache
def parsed(name):
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


class Trees(Mapping):
    """The files of the package by name, each parsed when a test asks for it: all processes of a test run import this file."""

    def __getitem__(self, name):
        return parsed(name)

    def __iter__(self):
        return iter(NAMES)

    def __len__(self):
        return len(NAMES)


TREES = Trees()

LEVELS = {
    "errors": 0,
    "extensible": 0,
    "custom_gradients": 0,
    "graphs": 1,
    "tables": 0,
    "temporary": 0,
    "runtime": 1,
    "mesh": 2,
    "collectives": 3,
    "placements": 3.5,
    "sharding": 4,
    "optimizers": 5,
    "losses": 5,
    "metrics": 5.5,
    "keras_layers": 6,
    "checkpoint": 6,
    "data": 6,
    "keras_hooks": 6.5,
    "strategy": 7,
    "compression": 8.5,
    "layers": 8.5,
    "pipeline": 8.5,
    "profiling": 9,
    "extensions.compression": 8,
    "extensions.kernels": 8,
    "extensions.ordering": 8,
    "extensions.pipeline": 8,
    "extensions.resuming": 8,
    "extensions.shared_memory": 8,
    "extensions.tensor": 8,
    "tools.launch": 9,
    "tools.planning": 9.5,
    "tools.doctor": 10,
    "__main__": 11,
}
TOP = "__init__.py"  # may import everything
BESIDE = ("extensions", "tools")  # rooms that the core never imports
DOORS = (TOP, "__main__.py", "compression.py", "layers.py", "pipeline.py")  # by which programs come to them

PRIVATE = {
    "custom_gradients.py",
    "runtime/coordination.py",
    "collectives/communicator.py",
    "collectives/automatic_order.py",
    "collectives/nested_functions.py",
    "collectives/where.py",
    "graphs/calls.py",
    "graphs/eager_operations.py",
    "graphs/records.py",
    "graphs/tape.py",
    "extensions/shared_memory/python_calls.py",
    "sharding/keras_scope.py",
    "sharding/replicated_variables.py",
    "sharding/variable.py",
    "checkpoint/backup_file.py",
    "checkpoint/backups.py",
    "checkpoint/discarding.py",
    "checkpoint/extra_state.py",
    "checkpoint/plain_variables.py",
    "checkpoint/saving.py",
    "checkpoint/unfailing_file.py",
    "data/device_iterators.py",
    "data/epoch_iterator.py",
    "data/iterator.py",
    "data/kept_functions.py",
    "keras_hooks/metrics.py",
    "keras_hooks/optimizers.py",
    "keras_hooks/tensorflow.py",
    "keras_layers/checkpoint_names.py",
    "keras_layers/recomputed.py",
    "losses/global_losses.py",
    "losses/over_global_batch.py",
    "strategy/extended.py",
    "strategy/variable_creation.py",
    "strategy/multi_worker_extended.py",
    "extensions/pipeline/stages/masks.py",
    "extensions/resuming/position.py",
    "extensions/tensor/plans/keras_tracing.py",
}
RAW_COLLECTIVES = {f"collectives/transports/{name}.py" for name in ("kernels", "kernel_messages", "member_order")}
TF_CONFIG = {"mesh/devices.py", "mesh/device_details.py", "mesh/logical_gpus.py", "runtime/threads.py"}
MAX_LINES = 400


def part(name):
    """Returns the package or module of tfdist that a file belongs to."""
    return room(name.removesuffix(".py").split("/"))


def room(names):
    """Returns the room of a path in tfdist: its first name, or the first two of extensions and tools."""
    return ".".join(names[: 1 + (names[0] in BESIDE and names[1:] not in ([], ["__init__"]))])


@functools.cache
def nodes(tree, *kinds):
    """Returns the nodes of these kinds, or all: a walk takes longer than what most rules ask of what it finds."""
    return [node for node in nodes(tree) if isinstance(node, kinds)] if kinds else list(ast.walk(tree))


def imports(tree):
    """Yields (module, line) of every import; `from a import b` counts as `a.b`, which may be a module."""
    for node in nodes(tree, ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        else:
            yield from ((f"{'.' * node.level}{node.module or ''}.{alias.name}", node.lineno) for alias in node.names)


def dotted(node):
    """Returns "tf.raw_ops.X" for such an expression, "" for any other."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return base and f"{base}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def uses(tree, prefix):
    return [node.lineno for node in nodes(tree, ast.Attribute) if dotted(node).startswith(prefix)]


def of_each_file(but=()):
    """Makes one test of a rule of a file, for all files but some: one for each took longer to collect and report than to run."""

    def decorate(rule):
        def test():
            broken = []
            for name in TREES.keys() - set(but):
                try:
                    rule(name)
                except AssertionError as error:
                    broken.append(str(error))
            assert not broken, "\n".join(sorted(broken))

        test.__name__, test.__doc__ = rule.__name__, rule.__doc__
        return test

    return decorate


def test_the_files_are_found():
    assert {TOP, "errors.py", "mesh/devices.py", "collectives/transports/kernels.py", "strategy/extended.py"} <= set(TREES)


def test_every_part_has_a_level():
    assert {part(name) for name in TREES if name not in (TOP, *(f"{beside}/__init__.py" for beside in BESIDE))} <= set(LEVELS)


@of_each_file()
def test_imports_point_down(name):
    own = part(name)
    for module, line in imports(TREES[name]):
        assert not module.startswith("."), f"tfdist/{name}:{line}: relative import"
        if module.partition(".")[0] != "tfdist" or name == TOP or module in map("tfdist.{}".format, BESIDE):
            continue
        other = room(module.split(".")[1:])
        assert other in LEVELS, f"tfdist/{name}:{line} imports {module}, which has no level"
        assert other == own or LEVELS[other] < LEVELS[own], f"tfdist/{name}:{line} imports up or across: {module}"


def test_tfdist_imports_no_tool():
    """Not its own imports, which `TOP` is excused from above, nor what they import."""
    code = "import sys, tfdist; print(*(name for name in sys.modules if name.startswith('tfdist.tools')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert not done.stdout.strip()
    assert callable(tfdist.plan)


@of_each_file()
def test_the_core_imports_nothing_beside_it(name):
    if name in DOORS or name.startswith(BESIDE):
        return
    for module, line in imports(TREES[name]):
        assert not module.startswith(tuple(f"tfdist.{beside}" for beside in BESIDE)), f"tfdist/{name}:{line} imports {module}"


@of_each_file()
def test_no_imports_inside_functions(name):
    tree = TREES[name]
    inside = [(one.lineno, one.end_lineno) for one in nodes(tree, ast.FunctionDef, ast.AsyncFunctionDef)]
    lines = [node.lineno for node in nodes(tree, ast.Import, ast.ImportFrom)]
    found = [line for line in lines if any(begin <= line <= end for begin, end in inside)]
    assert not found, f"tfdist/{name}:{found}"


def defined_in(package):
    """Returns, of a package's `__init__.py`, which module each name that it imports comes from."""
    name = "/".join([*package.split(".")[1:], TOP])
    froms = nodes(TREES[name], ast.ImportFrom) if name in NAMES else []
    return {alias.asname or alias.name: node.module for node in froms for alias in node.names}


def files_used(name):
    """Returns the files of tfdist that a file imports something of, also for types alone; of a package, where it is defined."""
    modules = {each.removesuffix(".py").replace("/", "."): each for each in TREES}
    found = set()
    for node in nodes(TREES[name], ast.ImportFrom):
        package = (node.module or "").removeprefix("tfdist").strip(".")
        for alias in node.names:
            source = defined_in(node.module).get(alias.name, node.module) if node.module.startswith("tfdist") else ""
            inside = f"{package}.{alias.name}".strip(".")
            found.add(modules.get(inside) or modules.get(source.removeprefix("tfdist.")))
    return found - {None}


def circles(graph):
    """Returns the nodes of `graph` from which a way leads back to them."""
    reached = {node: set(after) for node, after in graph.items()}
    while True:
        more = {node: after.union(*(reached.get(x, ()) for x in after)) for node, after in reached.items()}
        if more == reached:
            return {node for node, after in reached.items() if node in after}
        reached = more


def test_no_files_import_in_a_circle():
    """A file is read after those that it names, also for the types of its arguments."""
    files = [name for name in TREES if not name.endswith("__init__.py")]
    assert "collectives/emission.py" in files_used("collectives/program.py")
    assert "collectives/ops.py" in files_used("placements/redistribute.py"), "by way of the package"
    assert not circles({name: files_used(name) for name in files})


def test_circles_are_found():
    assert circles({1: [2], 2: [3], 3: [2], 4: [1]}) == {2, 3}


def test_schedules_are_data():
    """They can be made, checked, drawn and costed without TensorFlow, by the command line for instance."""
    names = [name for name in TREES if name.startswith("extensions/pipeline/schedules/")]
    assert "extensions/pipeline/schedules/schedule.py" in names
    for name in names:
        for module, line in imports(TREES[name]):
            assert module.partition(".")[0] not in ("tensorflow", "keras"), f"tfdist/{name}:{line}"
            if module.partition(".")[0] == "tfdist":
                assert module.startswith(("tfdist.extensions.pipeline.schedules.", "tfdist.errors")), f"tfdist/{name}:{line}"


def mentions(name, words):
    """Returns the lines of a file that match the regular expression `words`."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [f"tfdist/{name}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if re.search(words, line, re.I)]


@pytest.mark.parametrize("room", ["optimizers", "losses", "sharding", "collectives"])
def test_no_word_of_pipelines(room):
    """What a pipeline needs of these rooms follows from a layout, or is handed down. "pipe" is the name of a mesh axis there."""
    words = r"(?<!_)pipelin(?!e_parallel_size)|micro-?batch|stages? (of|in) (a|the|another|one)\b"
    files = [name for name in TREES if part(name) == room and name != "sharding/config.py"]  # which tells users of the setting
    assert files
    assert not [line for name in files for line in mentions(name, words)]


def test_no_word_of_tensor_parallelism():
    """A rank of a pipeline may hold a part of a tensor that passes between stages: only `sharding` knows of what kind."""
    files = [name for name in TREES if name.startswith("extensions/pipeline/")]
    assert not [line for name in files for line in mentions(name, r"tensor.?parallel|tensor axis|[\"']tensor[\"']")]


def test_mentions_finds_words():
    assert mentions("extensions/pipeline/model.py", "pipelin") and mentions("sharding/config.py", "tensor.?parallel")


@of_each_file()
def test_private_names_of_tensorflow_and_keras(name):
    found = [
        (module, line)
        for module, line in imports(TREES[name])
        if module.startswith(("tensorflow.python", "tensorflow.compiler", "tensorflow.core", "keras.src"))
    ]
    reached = [
        line
        for prefix in ("tf.python", "tf.__internal__.distribute", "tf.__internal__.eager", "keras.src")
        for line in uses(TREES[name], prefix)
    ]
    if name not in PRIVATE:
        assert not found + reached, f"tfdist/{name} uses private names: {found + reached}"


def replaced(tree):
    """Returns the lines that set or delete an attribute of something imported from Keras or TensorFlow."""
    imported = set()
    for node in nodes(tree, ast.Import, ast.ImportFrom):
        module = getattr(node, "module", None)
        for alias in node.names:
            if (module or alias.name).startswith(("keras", "tensorflow")):
                imported.add(alias.asname or alias.name.partition(".")[0])
    lines = []
    for node in nodes(tree, ast.Attribute, ast.Call):
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
        is_call = isinstance(node, ast.Call) and dotted(node.func) in ("setattr", "delattr")
        target = dotted(node.value) if is_set else dotted(node.args[0]) if is_call else ""
        if target.partition(".")[0] in imported:
            lines.append(node.lineno)
    return lines


@of_each_file()
def test_keras_is_changed_in_one_room(name):
    """Nobody else replaces an attribute of Keras or TensorFlow, or knows that some are replaced; strategies install the table."""
    if part(name) == "keras_hooks":
        return
    assert not replaced(TREES[name]), f"tfdist/{name} replaces something of Keras: write a row in keras_hooks"
    knows = [line for module, line in imports(TREES[name]) if module.startswith("tfdist.keras_hooks")]
    may_know = part(name) == "strategy" or name.startswith("extensions/")
    assert not knows or may_know, f"tfdist/{name}:{knows}: only strategies and extensions know of keras_hooks"


def test_that_rule_finds_what_it_looks_for():
    lines = [
        "import keras",
        "from tensorflow.python import config as c",
        "keras.Model.fit = 1",
        "setattr(c, 'x', 2)",
        "self.x = 3",
    ]
    assert replaced(ast.parse("\n".join(lines))) == [3, 4]


def test_the_named_files_exist_and_use_private_names():
    for name in PRIVATE:
        assert any(module.startswith(("tensorflow.python", "keras.src")) for module, _ in imports(TREES[name])), name


@of_each_file()
def test_raw_collectives_and_tf_config(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    if name not in RAW_COLLECTIVES:
        assert not uses(TREES[name], "tf.raw_ops.Collective"), name
        assert not re.search(r"import collective_ops|ops\.collective_ops", text), f"tfdist/{name}: collective_ops"
    if name not in TF_CONFIG:
        assert not uses(TREES[name], "tf.config"), name
        assert not any(module.startswith("tensorflow.config") for module, _ in imports(TREES[name])), name


@of_each_file(but=("custom_gradients.py",))
def test_no_gradient_keeps_the_graph_of_every_trace(name):
    assert not uses(TREES[name], "tf.custom_gradient"), f"tfdist/{name}: use tfdist.custom_gradients"


def test_those_rules_find_what_they_look_for():
    assert uses(TREES["custom_gradients.py"], "tf.custom_gradient")
    assert uses(TREES["collectives/transports/kernels.py"], "tf.raw_ops.Collective")
    assert uses(TREES["mesh/devices.py"], "tf.config")


@of_each_file()
def test_no_file_is_long(name):
    lines = (ROOT / name).read_text(encoding="utf-8").count("\n")
    assert lines < MAX_LINES, f"tfdist/{name} has {lines} lines"


@of_each_file()
def test_every_file_says_what_it_is(name):
    assert ast.get_docstring(TREES[name]), f"tfdist/{name} has no docstring"


def public(module):
    return [(f"{module.__name__}.{name}", getattr(module, name)) for name in module.__all__]


def test_public_names_have_docstrings():
    modules = [tfdist] + [value for _, value in public(tfdist) if inspect.ismodule(value) and hasattr(value, "__all__")]
    checked = 0
    for module in modules:
        assert len(module.__all__) == len(set(module.__all__)), module.__name__
        for name, value in public(module):
            if inspect.isclass(value) or inspect.isfunction(value):
                own = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
                # A dataclass without one is given its signature.
                assert own and not own.startswith(f"{value.__name__}("), f"{name} has no docstring"
                checked += 1
    assert checked > 20


def test_names_of_test_files_are_unique():
    """Without packages pytest imports them by their names alone, and refuses a second one."""
    names = [path.name for path in (ROOT.parent / "tests").rglob("test_*.py")]
    assert len(set(names)) == len(names), sorted(name for name in set(names) if names.count(name) > 1)
