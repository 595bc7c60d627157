"""Processes and machines: launchers, the process group, failures of ranks, and Slurm.

launch         the launcher and the rank of this process
tuning         settings of this process that libraries read when they are imported
devices        the GPU of a rank, and the precision in which it computes
process_group  waiting until all ranks have started and fit together, and the backend
context        `DistContext`: rank, device, collectives of objects, preparation once per node
failures       `FailureMonitor`: the first failure is reported, and every rank exits
watchdog       detection of ranks that failed, were killed or stopped, or wait; the hang report
restart        restart with a smaller micro-batch after memory ran out
stop_signal    what SIGTERM, SIGINT, SIGUSR1 and SIGHUP do
comm_volume    collectives, message bytes and sent bytes per optimizer step
slurm          batch and launch scripts, from the jinja2 templates in templates/
setup_files    the configurations and scripts that scripts/distributed_setup.py writes
"""
