"""A `fit` that goes on in the middle of an epoch, at the very step: `BackupAndRestore(save_freq=...)`, and the place in the data.

position      where an iterator is in its data, and how another process comes to the same place
step_backup   the backup of a step

Without it backups are of the ends of epochs, and each epoch begins with the first batch of its data, as with Keras's own.
"""

from tfdist.checkpoint import BACKUP
from tfdist.data import EPOCH_ITERATOR
from tfdist.extensions.resuming.position import PositionedIterator
from tfdist.extensions.resuming.step_backup import StepBackup

BACKUP.now = StepBackup
EPOCH_ITERATOR.now = PositionedIterator
