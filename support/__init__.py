"""The modules behind real_model_example.py, in packages by concern.

cli          flags, DeepSpeed and FSDP configurations, run files, checks before the model is loaded
cluster      launchers, ranks, rendezvous, failures of ranks, Slurm
commands     --check and --prefetch
data         from --dataset to batches of token ids
model        model and tokenizer, loss, LoRA, export, generation
strategies   DeepSpeed's set-up and ops, sharded optimizer states, gradients
checkpoints  saving, resuming, the format, conversion
memory       measured and estimated memory
report       metrics, results, trackers, the comparison of strategies
files        checks of the user's files, atomic writes, caches
console      lines, notices and progress bars of rank 0
errors       exceptions that end a run, and exit codes
advice       what library errors mean, and what the user can do
patches      all patches of other libraries
process      output that cannot fail, signal handlers before the run has its own
progress     progress bars
unwrap       the plain module, optimizer and tensor inside a strategy's wrapper
redaction    removal of secrets from messages and files
"""
