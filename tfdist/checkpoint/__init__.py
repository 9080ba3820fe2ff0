"""Level 6: saving a model that several workers hold, and exporting one that is sharded."""

from tfdist.checkpoint.backups import BACKUP, FitBackup
from tfdist.checkpoint.writing_role import all_workers_inside, chief_decides, cluster_strategy_of, is_chief, tfdist_strategy
