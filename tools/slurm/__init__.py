"""Generate configurations, launch scripts and Slurm jobs.

main         scripts/distributed_setup.py
setup_files  the contents of the files
slurm        batch scripts from templates/, also those of slurm/
"""
