"""Sharded parameters that are gathered once and held, for a stretch of a step in which they are used many times.

`UnshardSchedule` gathers a layer for its forward, drops it, and gathers it again for its backward: right for layers that are used
once each. Where a step uses the same layers again and again, each use would be a message. Within `held()` a parameter is
gathered, with its group, when it is read first, and every further read returns what was gathered, until `renew`.

    held()                 one gather of a group; the whole parameters exist until the last use of them has ended
    renew() between uses   one gather for each stretch between two calls; the whole parameters of one stretch exist at once

The gradient of a held parameter is whole: this rank's summand, which the optimizer's step sums over the ranks and shards, as it
does a gradient that the program has made itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.graphs import tape
from tfdist.sharding import keras_scope
from tfdist.sharding.config import MeshConfig
from tfdist.sharding.parameter_group import ParameterGroup, ParameterGroups
from tfdist.sharding.shard_messages import gather_parameters, messages_of, scope_name
from tfdist.sharding.units import copy_of, readers_of, sources_of, travelling_dtype

Key = tuple[int, tf.DType]  # the id of a variable, and the dtype in which it is gathered


class HeldParameters:
    """What one rank holds in one trace; an attachment of the rank's program."""

    def __init__(self, program: RankProgram):
        self._program = program
        self._known: dict[Key, tuple[Any, ParameterGroup, tf.DType | None]] = {}
        self._wholes: dict[Key, tf.Tensor] = {}
        self._seen: dict[Key, tf.Tensor] = {}  # what reads return: the whole, as the tapes know it
        self._names: dict[str, Key] = {}
        self._after: Sequence[tf.Operation] = ()
        self._config: MeshConfig  # of what has been read
        self.is_open = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A block in which parameters that are read are held."""
        self.is_open, self._after = True, ()
        try:
            yield
        finally:
            self.is_open = False
            self.renew(())
            self._names.clear()

    def renew(self, after: Sequence[tf.Operation]) -> None:
        """Forgets what is held; what is gathered from here on is gathered when operations `after` have run."""
        self._wholes.clear()
        self._seen.clear()
        self._after = after

    def wholes(self) -> dict[Key, tf.Tensor]:
        """Returns what is held now, of all that has been read since `held()` or `renew`."""
        return dict(self._wholes)

    @property
    def names(self) -> Mapping[str, Key]:
        """The names of the tensors that reads have returned since `held()`, with what they are."""
        return self._names

    def read(self, variable: Any, config: MeshConfig, dtype: tf.DType) -> tf.Tensor:
        """Returns the whole (local) value of `variable` in `dtype`, on this rank's tapes."""
        key, self._config = (id(variable), dtype), config
        if key not in self._known:
            compute_dtype = keras_scope.autocast_dtype()
            group = self._program.shared(ParameterGroups, config.group_bytes).group_of(variable)
            if travelling_dtype(variable, compute_dtype) != dtype:
                compute_dtype = None  # a read of the stored value in a layer that computes in another dtype
            self._known[key] = (variable, group, compute_dtype)
        whole = self.whole(key)
        with self._program.outermost():  # a loop hands its gradient on to what it captures
            shard = variable.component(self._program.rank).value()  # on the tapes that watch the variable
            if key not in self._seen or tape.tapes_watching([self._seen[key]]) < tape.tapes_watching([shard]):
                with tape.stop_recording():
                    self._seen[key] = tf.identity(whole)
                tape.record_gradient("Held", [self._seen[key]], [shard], functools.partial(_summand, variable.dtype))
        if not self._program.is_eager:
            self._names[self._seen[key].name] = key
        return self._seen[key]

    def group_of(self, key: Key) -> ParameterGroup:
        """Returns what a parameter that has been read is gathered with."""
        return self._known[key][1]

    def whole(self, key: Key) -> tf.Tensor:
        """Returns a whole parameter that has been read before, gathered where it is not held now."""
        if key not in self._wholes:
            self._gather(*self._known[key][1:])
        return self._wholes[key]

    def move_backward(self, wholes: Mapping[Key, tf.Tensor]) -> None:
        """Lets what the gradients' operations read of `wholes`, held earlier, be read from what is held now."""
        if self._program.is_eager:
            return
        keys = {before.name: key for key, before in wholes.items()}
        copies: dict[str, tf.Tensor] = {}
        for key, before in wholes.items():
            readers = [reader for reader in readers_of(before, key[0], keys) if tape.is_backward(reader.operation)]
            for reader in readers if self._wholes.get(key) is not before else ():
                for name in {before.name, *(source.name for source in sources_of(reader.tensor, keys))} & keys.keys():
                    copies[name] = self.whole(keys[name])
                tape.reconnect(reader.operation, reader.tensor, copy_of(reader.tensor, copies))

    def _gather(self, group: ParameterGroup, compute_dtype: tf.DType | None) -> None:
        program = self._program
        here = program.mesh.coordinate(program.rank).pipe
        members = [v for v in group.variables if v.layout.is_data_sharded and here in (v.layout.pipe_owners or [here])]
        label = f"unshard/{group.name}"
        with contextlib.ExitStack() as stack:
            stack.enter_context(program.outermost())
            stack.enter_context(program.on_trial(is_on=False))
            stack.enter_context(tape.stop_recording())
            stack.enter_context(tf.control_dependencies(None))
            stack.enter_context(tf.control_dependencies(self._after))
            stack.enter_context(tf.device(program.device))
            stack.enter_context(tf.name_scope(scope_name(label)))
            for message in messages_of(members, members, lambda v: travelling_dtype(v, compute_dtype)):
                dtype = travelling_dtype(message[0], compute_dtype)
                shards = [v.component(program.rank).value() for v in message]
                wholes = gather_parameters(program, shards, message, label, self._config, dtype)
                for member, whole in zip(message, wholes, strict=True):
                    key = (id(member), dtype)
                    self._known.setdefault(key, (member, group, compute_dtype))
                    self._wholes[key] = whole


def _summand(dtype: tf.DType, upstream: Any) -> list[Any]:
    """The way back through a read: the whole gradient, or rows of it, of this rank alone."""
    return [upstream if upstream.dtype == dtype else tf.cast(upstream, dtype)]
