"""Level 5: Keras metrics of the global batch."""
