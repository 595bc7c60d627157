"""--replay: repeats the steps of a run up to one, and shows that step.

command    --replay, from the repeated steps to replay-STEP.json
run_settings  the settings that the run had at the step
folder     the checkpoint from which the steps are repeated, and a temporary output folder
repeat     repeats the steps, and measures the last one
step_recorder  keeps the numbers of a step instead of logging them
layers     gradient norm and update ratio of each layer
sequences  loss of each token, and gradient norm of each sequence of the step
record     replay-STEP.json, next to what the run recorded
origins    rows of the dataset that a sequence comes from
"""
