"""--check, --prefetch and --show_sample: what a run needs, without training.

check          --check: tests what a run needs of this machine and its network
check_line     the result of one check
check_machine  checks of the software, the GPU and the limits, and of the hub
check_disks    checks of the disks
check_memory   the memory estimate next to the memory of the machine
check_network  the communication between the ranks
prefetch       --prefetch: downloads the model and the dataset and tokenizes the dataset
show_sample    --show_sample: prints a training sequence as tokens
"""
