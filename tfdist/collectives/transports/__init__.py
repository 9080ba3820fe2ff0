"""How bytes travel between ranks: TensorFlow's kernels, or, between CPU workers of one machine, memory that they share."""
