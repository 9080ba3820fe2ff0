"""Level 6: each process's part of the data, and whether all processes read the same."""

from tfdist.data import comparison, parts, signature
from tfdist.data.device_iterators import DistributedDataset, DistributedDatasetsFromFunction
from tfdist.data.end_of_data import EndOfData
from tfdist.data.epoch_iterator import EPOCH_ITERATOR, EpochIterator
from tfdist.data.split import split_batches
