"""Examines the devices of a machine, or of a job: `python -m tfdist doctor`.

command ──> examination ──> process (a child for the checks), workers (other workers' doctors)
   │            └──> machine (versions, topology, devices), bandwidth, parity, memory ──> session, check
   ├──> report ──> advice ──> topology
   └──> calibration (what plans are made of, measured likewise) ──> bandwidth, timing
"""
