"""--prove: one step on the user's model and data, made in several ways that must be equal.

prove             the ways, their runs and the table
prove_difference  how two of these steps differ
trainer_step      one step made by transformers.Trainer
"""
