"""Level 6: each process's part of the data, and whether all processes read the same."""

from tfdist.data import comparison, parts, steps
from tfdist.data.device_iterators import DistributedDataset, DistributedDatasetsFromFunction
from tfdist.data.ends import Ends
from tfdist.data.fit_data import FitData
from tfdist.data.generators import Tape
from tfdist.data.position import first_batch, is_generator, steps_of
from tfdist.data.signature import DatasetSignature, dataset_signature, difference, runs_python, unordered, unseeded
from tfdist.data.split import split_batches

__all__ = [
    "DatasetSignature",
    "DistributedDataset",
    "DistributedDatasetsFromFunction",
    "Ends",
    "FitData",
    "Tape",
    "comparison",
    "dataset_signature",
    "difference",
    "first_batch",
    "is_generator",
    "parts",
    "runs_python",
    "split_batches",
    "steps",
    "steps_of",
    "unordered",
    "unseeded",
]
