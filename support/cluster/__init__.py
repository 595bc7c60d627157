"""Processes and machines: launchers, rendezvous, failures of ranks, and Slurm.

launch       the launcher and the rank of this process; settings made before torch is imported
context      `DistContext`: ranks, preparation once per node, errors, stop signals, end of a run
failures     detection of ranks that were killed or stopped
devices      the GPU of a rank, and the precision in which it computes
comm_volume  collectives, message bytes and sent bytes per optimizer step
slurm        batch scripts, filled in from the files in templates/
setup_files  the configurations and scripts that scripts/distributed_setup.py writes
"""
