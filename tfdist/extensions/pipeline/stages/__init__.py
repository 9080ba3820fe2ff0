"""From a model to its stages: what the layers cost, where the model is split, and the functions that compute a stage."""
