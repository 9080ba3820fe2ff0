"""Level 6: saving a model that several workers hold."""

from tfdist.checkpoint import backups, saving
from tfdist.checkpoint.writing_role import WritingRole, chief_decides, cluster_strategy, writing_role

__all__ = ["WritingRole", "backups", "chief_decides", "cluster_strategy", "saving", "writing_role"]
