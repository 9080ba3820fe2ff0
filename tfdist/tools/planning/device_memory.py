"""The memory of the fullest device of a plan."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device at the fullest moment of a step.

    Attributes:
        parameters: the weights, trainable and not, as stored, and the exact shards of those whose copies are rounded.
        gradients: those of trainable weights, as far as the stage keeps them between backward and update.
        optimizer: the optimizer's variables.
        activations: what forward keeps for backward, and what operations hold while they run.
        buffers: messages being sent, gathered layers, sums under way.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int = 0
    buffers: int = 0

    @property
    def together(self) -> int:
        """The bytes that the device must have."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Returns the bytes of each part by its name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def largest(self) -> str:
        """Returns the name of the part that takes most."""
        parts = self.parts()
        return max(parts, key=lambda name: parts[name])
