"""The settings of a run: each flag is a field of one section, with its type, default and help.

settings     `Settings`: all sections, and the values of all flags by name
model        which model is trained, and how its forward pass is computed
data         which text is trained on, and how it becomes sequences
training     batches, steps, learning rate, optimizer, precision, evaluations
parallelism  the strategy, and the files with its options
cluster      launchers and time limits
output       what a run writes: results, checkpoints, the exported model, logs
debug        measurements, traces and tracebacks
command      what the program does instead of a run; the run file
trainer      flags of Hugging Face's Trainer that set others
fields       the field of a flag; the flags of a section
flag_types   types of the values of flags, with their limits

cli.flags builds the parser, --help and docs/FLAGS.md from these fields; cli.parse computes what
depends on other flags, and creates the settings, which never change. A function takes the sections
or the values that it uses.
"""
