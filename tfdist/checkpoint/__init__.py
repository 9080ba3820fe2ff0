"""Level 6: saving a model that several workers hold, and exporting one that is sharded."""

from tfdist.checkpoint import checkpoint_children, plain_variables, saving, tensorflow_checkpoints
from tfdist.checkpoint.backups import FitBackup
from tfdist.checkpoint.log_rows import keep_rows_before
from tfdist.checkpoint.writing_role import (
    WritingRole,
    all_workers_inside,
    chief_decides,
    cluster_strategy,
    cluster_strategy_of,
    tfdist_strategy,
    writing_role,
)

__all__ = [
    "FitBackup",
    "WritingRole",
    "all_workers_inside",
    "checkpoint_children",
    "chief_decides",
    "cluster_strategy",
    "cluster_strategy_of",
    "keep_rows_before",
    "plain_variables",
    "saving",
    "tensorflow_checkpoints",
    "tfdist_strategy",
    "writing_role",
]
