"""Level 6: each process's part of the data, and whether all processes read the same."""

from tfdist.data import comparison, parts, position, signature, steps
from tfdist.data.device_iterators import DistributedDataset, DistributedDatasetsFromFunction
from tfdist.data.ends import Ends
from tfdist.data.fit_data import FitData
from tfdist.data.generators import Tape
from tfdist.data.split import split_batches
