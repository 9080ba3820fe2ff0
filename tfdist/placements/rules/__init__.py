"""What operations make of placements, by kind of operation: functions of a `Call`, which `table` knows by types of operations."""
