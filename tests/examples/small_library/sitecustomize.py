"""On the PYTHONPATH of a program: Python's library is one package, since reading all of it takes longer than training on it."""

import os
import sysconfig

PACKAGE = "email"
_get_paths = sysconfig.get_paths


def get_paths(*args, **kwargs):
    paths = _get_paths(*args, **kwargs)
    return {**paths, "stdlib": os.path.join(paths["stdlib"], PACKAGE)}


sysconfig.get_paths = get_paths
