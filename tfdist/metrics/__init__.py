"""Level 5.5: Keras metrics of the global batch."""
