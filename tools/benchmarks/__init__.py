"""Speed and memory next to other trainers and on other machines.

peers                make bench: next to transformers.Trainer and accelerate
gpu_check            gpu_check.sh: what the tests only simulate, on a GPU; gpu_report and gpu_tables
                     write its report
drivers              the training loops of the peers
runner               runs programs, and records what they did
corpus               generated text
slow_links           forecasts and measurements over slow networks
unequal_ranks        --rank_shares on ranks of unequal speed
saves                how long training waits for a save; dcp_driver is the peer
tokenizing           the time to tokenize
synchronizing_calls  where the host waits for a GPU
"""
