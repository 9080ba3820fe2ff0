"""Rules: the placements of results, by kind of operation: functions of a `Call`, which `table` knows by types of operations."""
