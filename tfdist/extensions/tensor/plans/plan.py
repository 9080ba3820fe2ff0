"""Which layers are sharded, and how: patterns on the paths of layers or of their variables."""

import collections
import re
from collections.abc import Mapping
from typing import Any

import keras

from tfdist import errors
from tfdist.extensions.tensor.plans.layer_kinds import ROLES, is_attention, path_of
from tfdist.sharding import layers_within


class TensorPlan(collections.UserDict[str, str]):
    """An ordered mapping from patterns to the way in which the layers that they match are sharded over the tensor ranks.

    A pattern is a regular expression that is searched (`re.search`) in the path of a layer, and in those of the layer's
    variables: "mlp_in", "mlp_in$" and "mlp_in/kernel" all match the Dense layer "gpt/mlp_in". The first pattern that matches a
    layer decides; a layer that none matches stays whole. `model.layers[i].path` shows a path.

    The roles, for `Y = X A` over t ranks:

    * "column": `A = [A_1 … A_t]`, each rank computes its own part of `Y`. Dense, EinsumDense; attention layers: their heads.
    * "row": `A = [A_1; …; A_t]` and `Y = X_1 A_1 + … + X_t A_t`: a sum over the ranks. Dense, EinsumDense.
    * "vocab": each rank holds a part of the table's rows. Embedding.
    * "replicate": not sharded.

    The usual mistake is a pattern that matches more than it should: "dense_1" is found in "dense_10" too. Write "dense_1$".

    Args:
        patterns: the mapping; a plain dict will do wherever a plan is taken.

    Raises:
        ValueError: there are no patterns, one is not a string or not a regular expression, or a role is unknown.
    """

    def __init__(self, patterns: Mapping[str, str]) -> None:
        if not isinstance(patterns, Mapping) or not patterns:
            raise errors.value_error(
                "`plan` must map at least one pattern to a role.",
                plan=patterns,
                fix='For instance {"mlp_in": "column", "mlp_out": "row"}; `tfdist.suggest_plan` makes one.',
            )
        super().__init__(patterns)

    def __setitem__(self, pattern: Any, role: Any) -> None:
        if not isinstance(pattern, str):
            raise errors.value_error("`plan` must have patterns that are strings.", pattern=pattern)
        try:
            re.compile(pattern)
        except re.error as error:
            raise errors.value_error(
                "`plan` must have patterns that are regular expressions.",
                pattern=pattern,
                fix=f"It does not compile: {error}. `re.escape` makes a pattern of a path.",
            ) from error
        if role not in ROLES:
            raise errors.value_error(f"`plan` must give each pattern one of the roles {ROLES}.", pattern=pattern, role=role)
        super().__setitem__(pattern, role)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.data!r})"

    def as_dict(self) -> dict[str, str]:
        """Returns the patterns as a plain dict, in order."""
        return dict(self)

    def role_of(self, layer: keras.Layer) -> str | None:
        """Returns the role of a built layer, None if no pattern matches it.

        Raises:
            ValueError: the pattern matches a part of an attention layer, which is sharded as a whole.
        """
        pattern = self.pattern_of(layer)
        return None if pattern is None else self[pattern]

    def pattern_of(self, layer: keras.Layer) -> str | None:
        """Returns the first pattern that matches a built layer; raises like `role_of`."""
        return next((pattern for pattern in self if matches(pattern, layer)), None)


def matches(pattern: str, layer: keras.Layer) -> bool:
    """Returns whether a pattern matches a layer: its path, or, if it has no layers within, the path of one of its variables."""
    path = path_of(layer)
    if pattern == path or re.search(pattern, path):
        return True
    parts = [weight.path for weight in layer.weights if re.search(pattern, weight.path)]
    if is_attention(layer):
        parts += [part.path for part in layers_within(layer)[1:] if part.path and re.search(pattern, part.path)]
        if parts:
            raise errors.value_error(
                "`plan` must shard an attention layer as a whole: by its heads, which all its projections share.",
                pattern=pattern,
                matches=parts[0],
                fix=f'Before this pattern, give the layer itself a role: {{"{path}$": "column"}} or "replicate".',
            )
    return bool(parts) and len(layers_within(layer)) == 1
