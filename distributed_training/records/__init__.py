"""What runs have written: it is read, and runs are compared.

metrics_file   metrics.jsonl as a run writes it; metrics_reader: as it is read; loss_figure: drawn
results_types  the types of the keys of results.json
recorded_run   a run's results, steps and evaluations, and the numbers that a comparison shows
causes         what differs between two runs, and what each setting can change
agreement      how the losses and norms of two runs agree: points in common, and tolerances
compare        runs compared with a reference, and strategies with the first that completed
replayed       replay-STEP.json as text and as tables of the page
"""
