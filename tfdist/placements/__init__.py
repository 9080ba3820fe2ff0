"""Level 3.5: what each tensor of a rank's step is to the one that one device would have.

kinds <── call <── rules/ <── table <── traced_call, eager_call <── facts <── redistribute

A *placement* (`kinds`) says how the ranks' values of a tensor make up that of one device. A *rule* says what an operation makes
of placements, from its attributes alone; `table` has one for each type of operation. `facts` follows them through the graph of
a rank, from its arguments and variables on. `redistribute` changes placements: ranks agree on a number, or gather rows.
"""
