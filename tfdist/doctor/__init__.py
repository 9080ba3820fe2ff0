"""Level 10: examines the devices of a machine, or of a job: `python -m tfdist doctor`.

command ──> session_arguments ──> examination ──> process (a child for the checks), workers (other workers' doctors), progress
   │            └──> machine (versions, topology, devices), bandwidth, parity, memory ──> session, check
   └──> report ──> advice ──> topology
calibrate_command ──> session_arguments, calibration (what plans are made of, measured likewise) ──> bandwidth, timing
"""
