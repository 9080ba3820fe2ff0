"""Level 5: Keras metrics of the global batch."""

from tfdist.metrics import global_results

__all__ = ["global_results"]
