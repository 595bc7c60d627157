"""Task 4: the solution passes, and each wrong choice is named."""

import copy
import json

import pytest

from distributed_training.errors import UserError
from tools.lab.task import Place
from tools.lab.tasks.choice.check import MACHINES, check

SOLUTION = {
    "A": {"strategy": "offload", "batch_size": 4, "accumulation": 16, "hours": 157, "price": 79},
    "B": {"strategy": "zero1", "batch_size": 1, "accumulation": 16, "hours": 31, "price": 43},
    "C": {"strategy": "dp", "batch_size": 8, "accumulation": 1, "hours": 2.6, "price": 52},
    "choice": "B",
}


def names(folder, answer):
    (folder / "answer.json").write_text(json.dumps(answer))
    return [finding.name for finding in check(Place(folder, 0))]


def test_the_solution_passes(tmp_path):
    assert names(tmp_path, SOLUTION) == [""] * 7


@pytest.mark.parametrize("name", MACHINES)
def test_the_command_of_the_planner_recommends_the_solution(main_of, name):
    """With the flags of the page: the check and the command that students use agree."""
    pytest.importorskip("tools.plan")  # each tool can be deleted
    own, machine = SOLUTION[name], MACHINES[name]
    line = f"--model gpt2-xl --gpus {machine.gpus} --gpu_memory {machine.gpu_memory} "
    line += f"--host_memory {machine.host_memory} --seq_length 1024 --json "
    line += f"--batch_size {own['batch_size']} --gradient_accumulation_steps {own['accumulation']}"

    def answer(more=""):
        return json.loads(main_of("plan_memory", *line.split(), *more.split()).out)

    assert answer()["recommended"] == own["strategy"]
    # C has memory for more sequences than its share of the global batch.
    largest = answer("--solve batch")["answers"][own["strategy"]]
    assert min(largest, machine.sequences) in range(own["batch_size"], 2 * own["batch_size"])


@pytest.mark.parametrize(
    ("machine", "values", "place", "name"),
    [
        ("A", {"strategy": "dp", "batch_size": 1, "accumulation": 64}, 0, "does_not_fit"),
        ("A", {"strategy": "zero3", "batch_size": 1, "accumulation": 64}, 0, "does_not_fit"),
        ("A", {"strategy": "infinity"}, 0, "shards_too_much"),
        ("A", {"batch_size": 8, "accumulation": 8}, 0, "batch_too_large"),
        ("A", {"batch_size": 2, "accumulation": 32}, 0, "batch_too_small"),
        ("B", {"batch_size": 2, "accumulation": 8}, 2, "accumulation_not_planned"),
        ("B", {"batch_size": 4, "accumulation": 4}, 2, "batch_too_large"),
        ("B", {"strategy": "zero3"}, 2, "shards_too_much"),
        # What the planner recommends for 2 x 8: zero1 needs a smaller micro-batch.
        ("B", {"strategy": "zero2", "batch_size": 2, "accumulation": 8}, 2, "shards_too_much"),
        ("B", {"accumulation": 64}, 2, "forgot_the_ranks"),
        ("B", {"accumulation": 7}, 2, "global_batch"),
        ("B", {"batch_size": 0}, 2, "no_batch"),
        ("B", {"hours": 124}, 3, "gpu_hours"),
        ("B", {"hours": 31 * 3600}, 3, "seconds"),
        ("B", {"hours": 9.3}, 3, "peak_without_mfu"),
        ("B", {"hours": 10.4}, 3, "forward_only"),
        ("B", {"hours": 20.7}, 3, "without_forward"),
        ("B", {"hours": 1}, 3, "hours"),
        ("B", {"price": 10.8}, 3, "price_of_one_gpu"),
        ("B", {"price": 1}, 3, "price"),
        ("C", {"strategy": "fsdp"}, 4, "shards_too_much"),
        ("C", {"batch_size": 1, "accumulation": 8}, 4, "batch_too_small"),
    ],
)
def test_a_wrong_plan_is_named(tmp_path, machine, values, place, name):
    answer = copy.deepcopy(SOLUTION)
    answer[machine] |= values
    found = names(tmp_path, answer)
    assert found[place] == name and found.count("") == 6


@pytest.mark.parametrize(("choice", "name"), [("A", "too_late"), ("C", "not_the_cheapest")])
def test_a_wrong_choice_is_named(tmp_path, choice, name):
    assert names(tmp_path, SOLUTION | {"choice": choice}) == [""] * 6 + [name]


def test_the_choice_is_not_explained_before_the_numbers_are_right(tmp_path):
    answer = SOLUTION | {"choice": "C", "A": SOLUTION["A"] | {"hours": 1}}
    assert names(tmp_path, answer)[-1] == "choice"


@pytest.mark.parametrize(
    "answer", [{}, SOLUTION | {"A": {}}, SOLUTION | {"choice": "D"}, SOLUTION | {"B": 3}]
)
def test_an_answer_that_cannot_be_read_is_refused(tmp_path, answer):
    with pytest.raises(UserError):
        names(tmp_path, answer)
