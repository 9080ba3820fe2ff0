"""What one card shows of everything that tfdist does, split in logical GPUs: `python -m benchmarks.one_card`.

__main__ (arguments, files, tables) ──> rows (each in a process beside) ──> card (its devices)
    └──> machine, and the parts: exact, memory, cost, plans, overlap ──> trace
"""
