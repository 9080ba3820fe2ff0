"""Sharded parameters that are gathered once and held, for a stretch of a step in which they are used many times.

`UnshardSchedule` gathers a layer for its forward, drops it, and gathers it again for its backward: right for layers that are used
once each. Where a step uses the same layers again and again, each use would be a message. Within `held()` a parameter is
gathered, with its group, when it is read first, and every further read returns what was gathered, until `renew`.

    held()                 one gather of a group; the whole parameters exist until the last use of them has ended
    renew() between uses   one gather for each stretch between two calls; the whole parameters of one stretch exist at once

The gradient of a held parameter is whole: this rank's summand, which the optimizer's step sums over the ranks and shards, as it
does a gradient that the program has made itself.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import Part, RankProgram
from tfdist.graphs import tape
from tfdist.sharding.config import config_of
from tfdist.sharding.parameter_group import ParameterGroup, ParameterGroups
from tfdist.sharding.units import compute_dtype_of, copy_of, gather_group, readers_of, sources_of

Key = tuple[int, tf.DType]  # the id of a variable, and the dtype in which it is gathered


class ParameterCache(Part):
    """The parameters that one rank holds in one trace. A part of its state.

    Attributes:
        names: the names of the tensors that reads have returned since `held()`, with what they are.
    """

    def __init__(self, program: RankProgram):
        self._program = program
        self._known: dict[Key, tuple[Any, ParameterGroup, tf.DType | None]] = {}
        self._wholes: dict[Key, tf.Tensor] = {}
        self._seen: dict[Key, tf.Tensor] = {}  # what reads return: the whole, as the tapes know it
        self.names: dict[str, Key] = {}
        self._after: Sequence[tf.Operation] = ()
        self._config = config_of(tf.distribute.get_strategy())

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A block in which parameters that are read are held."""
        self._program.parameter_reader, self._after = self, ()
        try:
            yield
        finally:
            self._program.parameter_reader = None
            self.renew(())
            self.names.clear()

    def renew(self, after: Sequence[tf.Operation]) -> None:
        """Forgets what is held; what is gathered from here on is gathered when operations `after` have run."""
        self._wholes.clear()
        self._seen.clear()
        self._after = after

    def wholes(self) -> dict[Key, tf.Tensor]:
        """Returns what is held now, of all that has been read since `held()` or `renew`."""
        return dict(self._wholes)

    def read(self, variable: Any, dtype: tf.DType) -> tf.Tensor:
        """Returns the whole (local) value of `variable` in `dtype`, on this rank's tapes."""
        key = (id(variable), dtype)
        if key not in self._known:
            group = self._program.plan.shared(ParameterGroups, self._config.group_bytes).group_of(variable)
            self._known[key] = (variable, group, compute_dtype_of(variable, dtype))
        whole = self.whole(key)
        with self._program.outermost():  # a loop hands its gradient on to what it captures
            shard = variable.component(self._program.rank).value()  # on the tapes that watch the variable
            if key not in self._seen or tape.tapes_watching([self._seen[key]]) < tape.tapes_watching([shard]):
                with tape.stop_recording():
                    self._seen[key] = tf.identity(whole)
                # The way back: the whole gradient, or rows of it, of this rank alone.
                tape.record_gradient("Held", [self._seen[key]], [shard], lambda upstream: [tf.cast(upstream, variable.dtype)])
        if not self._program.is_eager:
            self.names[self._seen[key].name] = key
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
        with program.outermost(), program.on_trial(is_on=False), tape.stop_recording(), tf.control_dependencies(None):
            here = program.mesh.coordinate(program.rank)
            members = [v for v in group.variables if v.layout.is_data_sharded and v.layout.stores(here)]
            with tf.control_dependencies(self._after):
                shards = {id(v): v.component(program.rank).value() for v in members}
                for member, whole in gather_group(program, members, shards, compute_dtype, f"unshard/{group.name}", self._config):
                    key = (id(member), whole.dtype)
                    self._known.setdefault(key, (member, group, compute_dtype))
                    self._wholes[key] = whole
