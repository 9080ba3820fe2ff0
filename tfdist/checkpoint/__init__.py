"""Level 6: saving a model that several workers hold. Importing it installs the seams (`keras_saving`, `keras_callbacks`)."""

from tfdist.checkpoint import keras_callbacks, keras_saving
from tfdist.checkpoint.writing_role import WritingRole, writing_role

__all__ = ["WritingRole", "keras_callbacks", "keras_saving", "writing_role"]
