"""Level 1: traced graphs and gradient tapes, looked at and changed; nothing of ranks.

`walks` goes along graphs, `constants` reads the numbers that are known when they are traced, and `tape` has the private parts of
TensorFlow's gradient tape and of its operations.
"""
