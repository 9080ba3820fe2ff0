"""What functions take: for the tests of private names, which fail when a library changes them."""

import inspect


def parameters(function):
    """Returns the names of the parameters of `function`."""
    return list(inspect.signature(function).parameters)
