"""The memory planner, scripts/plan_memory.py: what fits, before a run is started; without PyTorch.

flags     the flags of the planner
workload  from the flags to the workload and the available memory
text      the estimates as tables and as JSON
command   the command of a run with the planned workload
"""
