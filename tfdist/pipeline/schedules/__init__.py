"""Schedules as data: who does what, in which order. No TensorFlow here."""
