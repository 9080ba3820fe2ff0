"""Level 6: each process's part of the data, and whether all processes read the same."""

from tfdist.data import comparison, parts, signature
from tfdist.data.device_iterators import DistributedDataset, DistributedDatasetsFromFunction
from tfdist.data.end_of_data import EndOfData
from tfdist.data.epoch_iterator import EpochIterator
from tfdist.data.position import FitData
from tfdist.data.split import split_batches
