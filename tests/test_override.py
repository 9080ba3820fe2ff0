"""Replacing functions and methods."""

import types

from tfdist.override import override


def test_every_export_of_a_function_is_replaced_once():
    def add(a, b=1):
        """Adds."""
        return a + b

    modules = types.SimpleNamespace(add=add), types.SimpleNamespace(add=add)

    for _ in range(2):

        @override("add", *modules)
        def tenfold(original, *args, **kwargs):
            return 10 * original(*args, **kwargs)

    for module in modules:
        assert module.add(1) == 20
        assert module.add(a=1, b=2) == 30
        assert module.add.__doc__ == "Adds."
        assert module.add._tfdist_override is add
    assert tenfold(add, 1) == 20  # itself as it was written


def test_methods_also_inherited_ones():
    class Parent:
        def name(self):
            return "parent"

    class Child(Parent):
        pass

    @override("name", Child)
    def shout(original, self):
        return original(self) + "!"

    assert Child().name() == "parent!"
    assert Parent().name() == "parent"
