"""The table: nothing is changed before `install`, and everything or nothing by it."""

import pathlib
import types

import pytest

from tfdist.keras_hooks.table import SUPPORTED, Table, resolve, signature_of


class Owner:
    """Stands for a class of Keras."""

    value = (1, 2)

    def add(self, a, b=1):
        """Adds."""
        return a + b

    def name(self, *, upper: bool = False):
        return "NAME" if upper else "name"


class Child(Owner):
    """Inherits what is replaced in it."""


OWNER, CHILD = f"{__name__}.Owner", f"{__name__}.Child"
ORIGINALS = dict(vars(Owner))


@pytest.fixture(autouse=True)
def _owner_as_it_was():
    yield
    for name in ("add", "name", "value"):
        setattr(Owner, name, ORIGINALS[name])
    if "name" in vars(Child):
        del Child.name


def table(signature="(self, a, b=1)", name="add"):
    made = Table()

    @made.replaces(CHILD, "name", signature="(self, *, upper=False)", why="To shout.")
    def shout(original, self, **kwargs):
        return original(self, **kwargs) + "!"

    @made.replaces(OWNER, name, signature=signature, why="To have ten\n    times as much.")
    def tenfold(original, self, *args, **kwargs):
        return 10 * original(self, *args, **kwargs)

    @made.replaces(OWNER, "value", why="To begin with 0.")
    def with_zero(value):
        return 0, *value

    assert tenfold(lambda self, a: a, None, 1) == 10, "itself as it was written"
    return made


def test_rows():
    rows = table().rows
    assert [(row.owner, row.name) for row in rows] == [(CHILD, "name"), (OWNER, "add"), (OWNER, "value")]
    assert rows[1].why == "To have ten times as much."
    assert dict(vars(Owner)) == ORIGINALS, "nothing is changed before `install`"


def test_install_twice():
    made = table()
    for _ in range(2):
        made.install()
        assert (Owner().add(1), Owner().add(a=1, b=2)) == (20, 30)
        assert Owner.add.__doc__ == "Adds."
        assert Owner.add._tfdist_original is ORIGINALS["add"]
        assert Owner.value == (0, 1, 2)
        assert (Child().name(), Child().name(upper=True), Owner().name()) == ("name!", "NAME!", "name")


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"signature": "(self, a)"}, r"Owner.add has the parameters \(self, a, b=1\), not \(self, a\)"),
        ({"name": "gone"}, "Owner.gone does not exist"),
    ],
)
def test_a_row_that_does_not_fit(wrong, found):
    made = table(**wrong)
    made.replaces("tests_no_such_module.Owner", "add", signature="()", why="")(print)
    with pytest.raises(NotImplementedError, match=found) as error:
        made.install()
    assert "tests_no_such_module.Owner.add does not exist" in str(error.value)
    assert "Received: versions='Keras 3." in str(error.value) and "Install what it was written for" in str(error.value)
    assert dict(vars(Owner)) == ORIGINALS and "name" not in vars(Child)


def test_one_of_several_signatures():
    made = table(signature=("(self, a)", "(self, a, b=1)"))
    made.install()
    assert Owner().add(1) == 20


def test_an_owner_that_has_moved():
    made = Table()
    made.replaces(("tests_no_such_module.Owner", OWNER), "value", why="")(lambda value: "replaced")
    made.install()
    assert (Owner.value, made.rows[0].owner) == ("replaced", OWNER)


def test_dotted_names():
    assert resolve("types.SimpleNamespace") is types.SimpleNamespace
    assert resolve("collections.abc").__name__ == "collections.abc"
    assert resolve("collections.abc.Nothing") is resolve("no_such_module.Owner") is None
    assert signature_of(Owner.name) == "(self, *, upper=False)"


def test_setup_allows_what_the_table_was_written_for():
    text = (pathlib.Path(__file__).parents[2] / "setup.py").read_text("utf-8")
    assert all(f'"{requirement}"' in text for requirement in SUPPORTED)
