"""A `fit` that goes on in the middle of an epoch: `BackupAndRestore(save_freq=2)`, and the place in the data.

Without it backups are of the ends of epochs, and each epoch begins with the first batch of its data, as with Keras's own.
"""

from tfdist.checkpoint import BACKUP
from tfdist.data import EPOCH_ITERATOR
from tfdist.extensions.resuming.position import PositionedIterator
from tfdist.extensions.resuming.step_backup import StepBackup

BACKUP.now = StepBackup
EPOCH_ITERATOR.now = PositionedIterator
