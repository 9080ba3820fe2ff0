"""Schedules as data: which rank does what, in which order. No file here imports TensorFlow: a test says so."""
