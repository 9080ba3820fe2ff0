"""From a model to stages: what its layers cost, where it is cut, and the functions that run a stage."""
