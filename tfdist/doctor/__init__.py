"""Level 10: examines the devices of a machine, or of a job: `python -m tfdist doctor`.

command ──> examination ──> process (a child for the checks), workers (the doctors of other workers), progress
   │            └──> machine (versions, topology, devices), bandwidth, parity, memory ──> session, check
   └──> report ──> advice ──> links ──> topology
calibrate_command ──> calibration (what plans are made of, measured by the same checks) ──> bandwidth, timing
"""
