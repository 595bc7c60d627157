"""--replay: repeats the steps of a run up to one, and shows that step.

folder     the checkpoint from which the steps are repeated, and a temporary output folder
repeat     repeats the steps, and measures the last one
layers     gradient norm and update ratio of each layer
sequences  loss of each token, and gradient norm of each sequence of the step
origins    rows of the dataset that a sequence comes from
"""
