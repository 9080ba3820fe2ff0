"""Keeps AutoGraph out of tfdist, as TensorFlow and Keras keep it out of themselves.

A `tf.function` rewrites the Python of what it calls, library code too unless the library is listed in AutoGraph's rules.
"""

from __future__ import annotations

from tensorflow.python.autograph.core import config


def exclude_from_conversion(package: str) -> None:
    """Adds `package` to AutoGraph's list of packages that are called as they are. Calling it again changes nothing."""
    rule = config.DoNotConvert(package)
    if not any(str(rule) == str(known) for known in config.CONVERSION_RULES):
        config.CONVERSION_RULES = (rule, *config.CONVERSION_RULES)


exclude_from_conversion("tfdist")
