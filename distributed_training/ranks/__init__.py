"""Processes and machines: launchers, the process group, and failures of ranks.

launch         the launcher and the rank of this process; an error before the ranks can communicate
gpus           whether this machine has GPUs that torch can use; unusable_gpu: if not, why
tuning         settings that libraries read when they are imported; the GPU and the precision
process_group  its stores, the software of its ranks, and the settings of torch
meeting        all ranks meet before there is a process group
compiler       torch.compile: what it needs of the machine, and its settings
context        `DistContext`: rank, device, collectives of objects, preparation once per node
stop           stop signals: their handler
all_ranks      from the meeting of the ranks to the exit of this process
failures       the first failure is reported, and every rank exits or restarts
first_failure  the entry of the first failure, on which all ranks agree
memory_advice  what a user reads whose memory ran out
restart        --auto_micro_batch: the new start of all ranks
watchdog       the thread that detects ranks that failed or were killed, and a run that hangs
rank_states    the states of the ranks, which they publish once per second
hang_files     the files of a hang report
hang_report    the table of the ranks in a hang report
comm_volume    collectives, message bytes and sent bytes per optimizer step
time_limit     the time limit of a Slurm job, and the signal before it
"""
