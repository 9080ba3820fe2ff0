"""Level 1: traced graphs and gradient tapes, looked at and changed; nothing of ranks.

`walks` goes along graphs, and `tape` has the private parts of TensorFlow's gradient tape and of its operations.
"""
