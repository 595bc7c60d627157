"""Records of runs with damaged values under each key: no exception but for the user."""

import json

from damaged_values import errors_of
from written_runs import RESULTS, save, steps

from distributed_training.records.compare import compare_runs
from tools.runs.comparison_text import as_json, as_text


def test_records_of_runs(tmp_path):
    other = save(tmp_path / "other", RESULTS, steps())
    results = {key: RESULTS[key] for key in ("status", "precision", "memory")}
    evaluation = {"step": 6, "eval_loss": 5.0, "perplexity": 2.0}
    content = {"results": results, "step": steps(norms=[1.0] * 6)[0], "evaluation": evaluation}

    def compare(place):
        comparison = compare_runs(str(other), str(place))
        json.dumps(as_json(comparison), allow_nan=False)
        as_text(comparison, wide=True)

    def of_run(changed):
        damaged = changed.get("results")
        records = [changed.get("step"), *steps()[1:], changed.get("evaluation")]
        full = {**RESULTS, **damaged} if isinstance(damaged, dict) else damaged
        compare(save(tmp_path / "run", full, records))

    def of_trainer(changed):
        (tmp_path / "trainer_state.json").write_text(json.dumps(changed))
        compare(tmp_path / "trainer_state.json")

    assert not errors_of(content, of_run)
    assert not errors_of({"log_history": [{"step": 1, "loss": 8.0, "grad_norm": 1.0}]}, of_trainer)
