"""Writes docs/reference.md from the docstrings of what `tfdist.__all__` lists: functions, classes and, member by member, modules.

    python docs/make_reference.py

The page depends on the code only: run it after a change of a public signature or docstring. A test fails when it is not
up to date.
"""

from __future__ import annotations

import enum
import inspect
import math
import pathlib
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import keras

import tfdist
from tfdist import mesh, profiling, runtime
from tfdist.extensions.tensor import plans as tensor_plans
from tfdist.tools import planning

PAGE = pathlib.Path(__file__).with_name("reference.md")

HEAD = """\
# Reference

Made from the docstrings by `docs/make_reference.py`. The other [pages](../README.md#documentation) show most
of it in use.
"""

# What public functions and properties return and `tfdist.__all__` does not list.
RETURNED = (
    mesh.DeviceMesh,
    mesh.Coordinate,
    runtime.Cluster,
    profiling.MemoryReport,
    profiling.DeviceMemory,
    tensor_plans.SuggestedPlan,
    tensor_plans.SuggestedSharding,
    planning.Plans,
    planning.Estimated,
    planning.Candidate,
    planning.StepTime,
    planning.Hardware,
)

# Modules of functions within modules, documented too.
WITHIN = {"collectives": ("activations",), "layers": ("regions",)}

LISTS = ("Args", "Attributes", "Call arguments", "Raises")
SECTION = re.compile(r"^(Args|Attributes|Call arguments|Input shape|Output shape|Returns|Raises|Source):\s*(.*)$")
WIDTH = 110  # of a signature on one line
DOTTED = re.compile(r"\b(?:tensorflow|keras|tfdist|collections|typing|numpy)\.[\w.]+")
ENTRY = re.compile(r"^    (\S[^:]*): (.*)$")


class _Verbatim:
    """An annotation that prints as it was written, without quotes."""

    def __init__(self, text: str):
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _public_name(dotted: str) -> str:
    """Returns the name by which a program calls what a module defines as `dotted`: "tf.Tensor", "keras.Model", "Sequence"."""
    try:
        found = pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError, ValueError):
        return dotted  # as it was written
    if dotted.startswith("tensorflow."):
        names = [name for attribute in ("_tf_api_names", "_estimator_api_names") for name in getattr(found, attribute, ())]
        return f"tf.{min(names, key=len)}" if names else dotted
    if dotted.startswith("keras."):
        return min(_exports(found), key=len, default=dotted)
    return dotted.rpartition(".")[2]


def _exports(found: Any) -> list[str]:
    paths = getattr(found, "_api_export_path", ())
    return [paths] if isinstance(paths, str) else list(paths)


def _initializer(made: Any) -> Any:
    """Returns the `__init__` of a class where that makes its signature. Python 3.11.2 would take an inherited `__new__`."""
    if not inspect.isclass(made):
        return None
    base = next(base for base in made.__mro__ if {"__init__", "__new__"} & vars(base).keys())
    return None if base is object else vars(base).get("__init__")


def signature(function: Any, width: float = math.inf) -> str:
    """Returns the signature of `function` without `self`; past `width` characters, with a line per parameter."""
    found = inspect.signature(_initializer(function) or function)

    def verbatim(annotation: Any) -> Any:
        if annotation is inspect.Parameter.empty:
            return annotation
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        return _Verbatim(DOTTED.sub(lambda found: _public_name(found[0]), text))

    parameters = [
        parameter.replace(annotation=verbatim(parameter.annotation))
        for name, parameter in found.parameters.items()
        if name != "self"
    ]
    text = str(found.replace(parameters=parameters, return_annotation=verbatim(found.return_annotation)))
    if len(text) <= width:
        return text
    kinds = [parameter.kind for parameter in parameters]
    shown = [str(parameter) for parameter in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        shown.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    result = "" if found.return_annotation is found.empty else f" -> {verbatim(found.return_annotation)!r}"
    return "(\n" + "".join(f"    {parameter},\n" for parameter in shown) + ")" + result


def markdown(docstring: str) -> list[str]:
    """Returns the lines of a docstring as Markdown: its sections as lists, indented pictures and code as they are."""
    lines: list[str] = []
    section = ""
    for line in docstring.splitlines():
        if opening := SECTION.match(line):
            section, rest = opening.groups()
            lines += [f"**{section}**" + (f" {rest}" if rest else "")]
            lines += [""] if section in LISTS else []
        elif section in LISTS and (entry := ENTRY.match(line)):
            names = ", ".join(f"`{name}`" for name in entry[1].split(", "))
            lines.append(f"- {names}: {entry[2]}")
        elif section in LISTS and line.startswith("        "):
            lines.append("  " + line.strip())
        elif section and line.startswith("    "):
            lines.append(line[4:])
        else:
            section = section if not line.strip() else ""
            lines.append(line)
    return [*lines, ""]


def class_members(owner: type) -> Iterator[tuple[str, Any]]:
    """Yields the public methods and properties that `owner` itself defines and documents, in the order of its code."""
    for name, member in vars(owner).items():
        is_callable = inspect.isfunction(member) or isinstance(member, property)
        # `inspect.getdoc` finds the docstring of the method that it overrides too; Keras's do not belong here.
        has_own = member.__doc__ or not issubclass(owner, keras.Operation | keras.losses.Loss)
        if not name.startswith("_") and is_callable and has_own and inspect.getdoc(member):
            yield name, member


def first_line(member: Any) -> str:
    """Returns the first line of a docstring; "" without one."""
    return (inspect.getdoc(member) or "").partition("\n")[0]


def describe(name: str, member: Any, level: int) -> list[str]:
    """Returns the section of a function or class called `name`, its heading of `level`."""
    lines = [f"{'#' * level} `{name}`", ""]
    if not callable(member):  # a constant
        shown = f"`{member!r}`" if type(member).__repr__ is not object.__repr__ else first_line(type(member))
        return [*lines, shown, ""]
    if not (inspect.isclass(member) and issubclass(member, enum.Enum)):  # nobody calls an enum
        lines += ["```text", f"{name.rpartition('.')[2]}{signature(member, WIDTH)}", "```", ""]
    lines += markdown(inspect.getdoc(member) or "")
    if inspect.isclass(member):
        for own, method in class_members(member):
            if isinstance(method, property):
                lines += [f"**`{own}`** (property)", ""]
            else:
                lines += [f"**`{own}{signature(method)}`**", ""]
            lines += markdown(inspect.getdoc(method))
    return lines


def describe_module(name: str, module: ModuleType) -> list[str]:
    """Returns the section of a module, member by member."""
    lines = [f"## tfdist.{name}", "", *markdown(inspect.getdoc(module))]
    for own in sorted(module.__all__, key=str.lower):
        member = getattr(module, own)
        if not inspect.ismodule(member) and own not in tfdist.__all__:
            lines += describe(f"tfdist.{name}.{own}", member, 3)
    for within in WITHIN.get(name, ()):
        lines += describe_functions(f"tfdist.{name}.{within}", getattr(module, within))
    return lines


def describe_functions(name: str, module: ModuleType) -> list[str]:
    """Returns the section of a module within another: its docstring and its public functions, in the order of its code."""
    lines = [f"### `{name}`", "", *markdown(inspect.getdoc(module))]
    for own, member in vars(module).items():
        if inspect.isfunction(member) and member.__module__ == module.__name__ and not own.startswith("_"):
            lines += describe(f"{name}.{own}", member, 4)
    return lines


def reference() -> str:
    """Returns the page."""
    members = {name: getattr(tfdist, name) for name in tfdist.__all__}
    lines = [HEAD, "## tfdist", ""]
    for name, member in members.items():
        if not inspect.ismodule(member):
            lines += describe(f"tfdist.{name}", member, 3)
    for member in RETURNED:
        lines += describe(f"{member.__module__.rpartition('.')[0]}.{member.__name__}", member, 3)
    for name, member in members.items():
        if inspect.ismodule(member):
            lines += describe_module(name, member)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
