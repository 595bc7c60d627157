"""The public names of the package, as another program or a notebook uses them."""

import json
import os
import subprocess
import sys

import pytest
from conftest import PROJECT

import distributed_training
from distributed_training import (
    STRATEGIES,
    Comparison,
    RecordedRun,
    Settings,
    UserError,
    compare_runs,
    convert_checkpoint,
    open_model,
    plan,
    read_run,
    resolve_settings,
)
from distributed_training.known_models import gpt2_config

NAMES = """
    Settings resolve_settings STRATEGIES plan Plan read_run RecordedRun compare_runs Comparison
    convert_checkpoint open_model UserError
    """.split()
HEAVY = {"torch", "numpy", "transformers", "yaml", "jinja2", "argparse", "json"}


def test_there_are_twelve_public_names():
    assert (
        sorted(distributed_training.__all__)
        == sorted(NAMES)
        == sorted(distributed_training.MODULES)
    )
    assert {*NAMES} <= {*dir(distributed_training)}
    for name in NAMES:
        value = getattr(distributed_training, name)
        if name != "STRATEGIES":
            assert value.__doc__ and value.__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        distributed_training.nope  # noqa: B018


def test_each_function_documents_its_arguments_and_errors():
    for function in (
        resolve_settings,
        plan,
        read_run,
        compare_runs,
        convert_checkpoint,
        open_model,
    ):
        assert all(part in function.__doc__ for part in ("Args:", "Returns:", "Raises:")), function
        for name in function.__annotations__.keys() - {"return"}:
            assert name in function.__doc__, (function, name)


def test_an_import_of_the_package_imports_nothing_heavy():
    """Nor does a plan, or a comparison of runs, import PyTorch."""
    code = (
        "import sys; import distributed_training; print(*sys.modules)\n"
        "from distributed_training import STRATEGIES, compare_runs, plan, read_run\n"
        "plan('gpt2'); print(*sys.modules)"
    )
    command = [sys.executable, "-S", "-c", code]  # -S: without what .pth files import
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path[1:]])}
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    first, second = ({*line.split()} for line in run.stdout.splitlines())
    assert not first & HEAVY
    own = {name for name in first if name.startswith("distributed_training")}
    assert own == {"distributed_training", "distributed_training.about"}
    assert not second & {"torch", "numpy", "transformers"}


# ---------------------------------------------------------------------------------------- settings


def test_arguments_and_values_by_name_are_the_same_settings():
    line = ["--strategy", "zero2", "--batch_size", "8", "--no_eval", "--generate", "a", "--lr=1e-3"]
    values = {"strategy": "zero2", "per_device_train_batch_size": 8, "eval": False, "lr": 1e-3}
    settings = resolve_settings(values | {"generate": ("a",), "seq_length": None})
    assert isinstance(settings, Settings) and settings.flags() == resolve_settings(line).flags()
    assert settings.training.batch_size == 8 and settings.strategy.stage == 2
    assert settings.training.lr_scheduler == "linear"  # a default


def test_values_override_a_run_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("strategy: zero3\nbatch_size: 2\n")
    for given in ({"config": file, "batch_size": 4}, ["--config", file, "--batch_size", 4]):
        settings = resolve_settings(given)
        assert (settings.parallelism.strategy, settings.training.batch_size) == ("zero3", 4)


@pytest.mark.parametrize(
    "given, says",
    [
        ({"bach_size": 8}, r"did you mean --batch_size\?$"),
        ({"batch_size": 0}, "0 is not"),
        ({"batch_size": 8, "micro_batch_size": 4}, "same flag"),
        ({"generate": [{}]}, "nested"),
        ({"eval_only": True, "no_eval": True}, "cannot be used together"),
        ({"help": True}, "help"),
        (["--help"], "ends the program"),
        (["-hh"], "ends the program"),
        (["--version"], "ends the program"),
        (["--config", "missing.yaml"], "missing.yaml"),
        ("--strategy zero2", "or a list"),
        (None, "use a dictionary"),
    ],
)
def test_wrong_flags_raise_an_error_and_do_not_exit(given, says, capsys):
    environment = dict(os.environ)
    with pytest.raises(UserError, match=says):
        resolve_settings(given)
    assert not "".join(capsys.readouterr()) and dict(os.environ) == environment


# ------------------------------------------------------------------------------------------- plans


def test_settings_decide_the_strategy_unless_one_is_given():
    settings = resolve_settings({"model": "gpt2", "strategy": "zero3", "global_batch_size": 32})
    own, other = plan(settings, gpus=2), plan(settings, "fsdp", gpus=2, seq_length=128)
    assert (own.strategy, other.strategy, other.seq_length) == ("zero3", "fsdp", 128)
    assert own.workload.accumulation == 4  # of two ranks
    assert own.fits is None and own.largest_batch is None  # without a limit
    assert {*STRATEGIES} == {plan(settings, name).strategy for name in STRATEGIES}


def test_a_path_is_not_the_name_of_a_known_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    config = {**gpt2_config(2, 2, 64), "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config))
    assert plan("./gpt2").peak_bytes < plan("gpt2").peak_bytes / 4
    assert plan(tmp_path / "gpt2").peak_bytes == plan("./gpt2").peak_bytes
    with pytest.raises(UserError, match="no such file or folder"):
        plan("./gpt2-xl")
    with pytest.raises(UserError, match="empty"):
        plan("")


@pytest.mark.parametrize(
    "options, says",
    [
        ({"strategy": "zero4"}, "zero4"),
        ({"strategy": "auto"}, "name a value"),
        ({"strategy": STRATEGIES["dp"]}, "is a name"),
        ({"gpus": 0}, "gpus=0 is not a whole number"),
        ({"gpus": 2.5}, "gpus=2.5 is not a whole number"),
        ({"gpus": "4"}, "gpus='4' is not a whole number"),
        ({"num_gpus": 4}, "called gpus"),
        ({"batch_size": "auto"}, "largest_batch"),
        ({"gpu_memory": -1}, "gpu_memory=-1 is not a number"),
        ({"gpu_memory": "16GB"}, r"gpu_memory='16GB' is not a number.* GB"),
        ({"gpu_memory": 16e9}, r"is not a number from 0.001 to 100000 GB \(2\^30 bytes\)"),
        ({"gpu_memory": 10**400}, "is not a number"),
        ({"gpu_memory": float("nan")}, "gpu_memory=nan is not a number"),
        ({"host_memory": True}, "host_memory=True is not a number"),
        ({"gpus": 4, "gpus_per_node": 0}, "gpus_per_node=0"),
        ({"gpus": 12, "gpus_per_node": 8}, "multiple"),
        ({"batch": 8}, "unknown argument --batch"),
        ({"strategy": "infinity", "optim": "muon"}, "muon"),
        ({"device": "cpu", "gpu_memory": 8}, "host_memory"),
        ({"rank_shares": "2,1", "gpus": 2}, "equal ranks"),
        ({"eval_only": True}, "supports training"),
        ({"seq_length": 2048}, "1024 positions"),
    ],
)
def test_what_cannot_be_planned_is_an_error(options, says):
    with pytest.raises(UserError, match=says):
        plan("gpt2", **options)


def test_the_cost_of_a_plan():
    planned = plan("gpt2", "zero2", gpus=4, gpu_memory=16, gradient_accumulation_steps=2)
    cost = planned.cost(tokens=4_000_000, tokens_per_second=8_000, price=3)
    sequences = 4_000_000 // 512
    assert cost.tokens == 512 * sequences and cost.steps == -(-sequences // 32)
    assert cost.hours == pytest.approx(cost.tokens / 8_000 / 3600)
    assert cost.gpu_hours == pytest.approx(4 * cost.hours) and cost.price == 3 * cost.gpu_hours
    assert cost.tokens_per_second_per_gpu == 2_000
    assumed = planned.cost(max_steps=10, device="A100")
    assert assumed.tokens == 10 * 32 * 512 and assumed.price is None
    half = planned.cost(max_steps=10, device="A100", mfu=0.2)
    assert half.hours == pytest.approx(2 * assumed.hours) and half.as_dict()["steps"] == 10
    assert planned.cost(tokens=1e6, tokens_per_second=8, price=0).price == 0
    for wrong in (
        {},
        {"tokens": -1, "tokens_per_second": 1},
        {"tokens": "1e6", "tokens_per_second": 1},
        {"tokens": 1, "tokens_per_second": 0},
        {"tokens": 1, "tokens_per_second": 1, "price": "2"},
        {"max_steps": 2.5, "tokens_per_second": 1},
        {"tokens": 1, "device": "A100", "mfu": 40},
        {"tokens": 1, "device": 100},
        {"tokens": 1},
        {"device": "A100"},
        {"tokens": 1, "max_steps": 1, "device": "A100"},
        {"tokens": 1, "device": "A100", "tokens_per_second": 1},
        {"tokens": 1, "tokens_per_second": 1, "mfu": 0.5},
        {"tokens": 1, "device": "Z80"},
    ):
        with pytest.raises(UserError):
            planned.cost(**wrong)


# ------------------------------------------------------------------------------------ recorded runs


@pytest.fixture
def write_run(tmp_path):
    """write_run(name, losses, **results) writes the files of a run; returns the folder as text."""

    def write(name, losses, **results):
        folder = tmp_path / name
        folder.mkdir()
        records = [{"step": step, "loss": loss, "lr": 1e-3} for step, loss in enumerate(losses, 1)]
        records.insert(1, {"step": 1, "eval_loss": 7.5, "perplexity": 1808.0})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        facts = {"status": "failed", "reason": "by hand", "precision": "fp32", **results}
        (folder / "results.json").write_text(json.dumps(facts))
        return str(folder)

    return write


def test_a_run_has_results_steps_and_evaluations(write_run, tmp_path):
    run = read_run(write_run("run", [8.0, 7.0, None]))
    assert isinstance(run, RecordedRun) and run.results["status"] == run.status == "failed"
    assert [(record["step"], record["loss"]) for record in run.steps] == [
        (1, 8.0),
        (2, 7.0),
        (3, None),
    ]
    assert [record["eval_loss"] for record in run.evaluations] == [7.5]
    assert len(repr(run)) < 300 and "by hand" in repr(run)
    with pytest.raises(UserError, match="is no run"):
        read_run(tmp_path / "missing")
    with pytest.raises(UserError, match=r"one of the runs in it \(.*run\)"):
        read_run(tmp_path)
    with pytest.raises(UserError, match="folder=None is neither"):
        read_run(None)
    assert run.curve("eval_loss") == {(1, 1): 7.5}


def test_runs_are_compared_by_their_folders(write_run):
    a, b, c = (
        write_run(name, [8.0, 7.0, last]) for name, last in (("a", 6.0), ("b", 6.0), ("c", 6.1))
    )
    assert compare_runs(a, b).same_model
    recorded = read_run(a)
    found = compare_runs(recorded, b, c)
    assert isinstance(found, Comparison) and not found.same_model
    assert [run.name for run in found.departing] == ["C"]
    assert found.runs[2].agreement.first.last == 3
    assert "step 3" in repr(found) and "equal losses: False" in repr(found)
    assert not recorded.name and not recorded.agreement.points  # as it was read
    assert compare_runs(a, c, tolerance=0.1).same_model
    for wrong, says in (
        ([a], "two or more"),
        ([[a, b]], "separate arguments"),
        ([a, None], "neither text nor a path"),
    ):
        with pytest.raises(UserError, match=says):
            compare_runs(*wrong)
    for tolerance in (-1, "x"):
        with pytest.raises(UserError, match="tolerance="):
            compare_runs(a, b, tolerance=tolerance)


def test_equal_losses_do_not_hide_other_settings(write_run):
    """The learning rate was too low for the other decay of weights to show."""
    a, b = (
        write_run(
            name,
            [8.0, 7.0, 6.0],
            flags={"weight_decay": decay},
            run_signature={"hard": {"seed": 1}},
        )
        for name, decay in (("a", 0.01), ("b", 0.5))
    )
    found = compare_runs(a, b)
    assert found.same_model and not found.runs[1].agreement.causes
    (difference,) = found.runs[1].agreement.differences
    assert (difference.name, difference.a, difference.b) == ("weight_decay", 0.01, 0.5)
    assert repr(found).splitlines()[-2:] == [
        "B differs in weight_decay (0.01 and 0.5)",
        "equal losses: True",
    ]


# ---------------------------------------------------------------------- checkpoints, trained models


def test_what_cannot_be_converted_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    for source, target, to, says in (
        ("missing", "new", "hf", "no such folder"),
        ("empty", "new", "gguf", "to='gguf' is not one of hf, torch, checkpoint"),
        ("empty", "empty", "torch", "exists"),
        ("empty", "new", "torch", "no checkpoint"),
    ):
        with pytest.raises(UserError, match=says):
            convert_checkpoint(tmp_path / source, str(tmp_path / target), to=to)
        for dtype in ("fp8", ["fp32"]):
            with pytest.raises(UserError, match="dtype="):
                convert_checkpoint(tmp_path, tmp_path / "new", to="hf", dtype=dtype)
    (tmp_path / "out of memory").mkdir()
    with pytest.raises(UserError, match=r"out of memory exists: name a new folder\.$") as refused:
        convert_checkpoint(tmp_path, tmp_path / "out of memory", to="hf")
    assert refused.value.exit_code == 2
    (tmp_path / "out of memory").rmdir()
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_model_in_a_folder_is_opened_for_generation(llama):
    import torch
    from transformers import AutoModelForCausalLM

    from distributed_training.model.weights import as_dtype

    model, tokenizer = open_model(llama)
    ids = tokenizer("the quick", return_tensors="pt")["input_ids"]
    assert not model.training and ids.shape == (1, ids.numel())
    expected = AutoModelForCausalLM.from_pretrained(llama, **as_dtype(model.dtype))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
    new = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert new.shape[1] <= ids.shape[1] + 3 and model.generation_config.pad_token_id is not None
    with pytest.raises(UserError, match=r"^\./missing: no such folder"):
        open_model("./missing")
    with pytest.raises(UserError, match="neither text nor a path"):
        open_model(None)


def test_a_name_that_is_not_found_changes_nothing_for_the_next_call(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    before = dict(os.environ)
    for call in (lambda: open_model("nobody/nothing"), lambda: plan("nobody/nothing")):
        with pytest.raises(UserError, match=r"127\.0\.0\.1:9\) cannot be reached") as refused:
            call()
        assert "local_files_only" not in str(refused.value)
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("a fault"), OSError(28, "No space left on device")]
)
def test_an_unexpected_exception_stays_itself(llama, tmp_path, monkeypatch, error):
    from distributed_training.checkpoints import convert
    from distributed_training.trained import load

    def fail(*_):
        raise error

    monkeypatch.setattr(load, "load", fail)
    monkeypatch.setattr(convert, "OwnCheckpoint", fail)
    expected = UserError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        open_model(llama)
    with pytest.raises(expected):
        convert_checkpoint(tmp_path, tmp_path / "new", to="hf")
