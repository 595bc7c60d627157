"""What a run has trained is a Hugging Face model, whatever strategy trained it."""

import json
import shutil
import sys

import pytest
from conftest import PROJECT, assert_close, finish, free_port, load_exported, start

from support.checkpoints.foreign import load_tensors

CONVERT = [sys.executable, PROJECT / "scripts" / "convert_checkpoint.py"]
WORK = ["--seq_length", "32", "--num_samples", "8", "--batch_size", "2", "--no_eval"]


def test_export_goes_where_and_how_it_is_asked_for(script, llama, text_file, tmp_path):
    import torch
    from transformers import AutoTokenizer

    run = script(
        "--model",
        llama,
        "--dataset",
        text_file,
        *WORK,
        "--strategy",
        "zero2",
        "--export_hf",
        tmp_path / "mine",
        "--export_dtype",
        "bf16",
        launcher="torchrun",
        ranks=2,
    )
    model = load_exported(tmp_path / "mine")
    assert model.dtype == torch.bfloat16 and model.config.use_cache
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    tokens = AutoTokenizer.from_pretrained(tmp_path / "mine")("the lazy dog")["input_ids"]
    assert tokens == AutoTokenizer.from_pretrained(llama)("the lazy dog")["input_ids"]
    card = (tmp_path / "mine" / "README.md").read_text()
    assert f"{run.results['parameters']:,} parameters" in card and "zero2" in card
    assert f"{run.results['train_loss_last']:.4g}" in card
    assert not (run.folder / "hf").exists() and run.results["export"]["folder"] == str(
        tmp_path / "mine"
    )
    again = script(
        "--model", llama, "--dataset", text_file, *WORK, "--export_hf", tmp_path / "mine", ok=False
    )
    assert again.code == 2 and "--overwrite" in again.error
    for target, said in [(llama, "--model"), (".", "current"), (text_file.parent, "--dataset")]:
        refused = script(
            "--model",
            llama,
            "--dataset",
            text_file,
            *WORK,
            "--export_hf",
            target,
            "--overwrite",
            ok=False,
        )
        assert refused.code == 2 and f"would replace {said}" in refused.error.replace(
            "the current", "current"
        )
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.txt").write_text("years of work")
    other = script(
        "--model",
        llama,
        "--dataset",
        text_file,
        *WORK,
        "--export_hf",
        tmp_path / "papers",
        "--overwrite",
        ok=False,
    )
    assert other.code == 2 and (tmp_path / "papers" / "thesis.txt").exists()


def test_no_export(script):
    run = script(*WORK, "--max_steps", "1", "--no_export")
    assert not (run.folder / "hf").exists() and "export" not in run.results


# --------------------------------------------------------------------------------------- converting


@pytest.fixture(scope="module")
def saved(script):
    """Two ranks, zero2, a checkpoint at the end; and the export of the same moment."""
    return script(
        *WORK,
        "--precision",
        "fp32",
        "--strategy",
        "zero2",
        "--save_every",
        "2",
        launcher="torchrun",
        ranks=2,
    )


def test_inspect(saved, begin):
    """In a process of its own, as a user starts it."""
    process = begin([*CONVERT, saved.folder, "--inspect"], {"HF_HUB_OFFLINE": "1"})
    out, err = finish(process, 120)
    assert process.returncode == 0 and "Traceback" not in err, err
    assert "step 2" in out and "zero2 on 2 ranks" in out and "4,339,200 parameters" in out
    assert "transformer.wte.weight" in out and "4096×256" in out


def test_to_hf_is_the_export(saved, convert, tmp_path):
    code, out = convert(saved.folder, "--to", "hf", tmp_path / "hf", "--max_shard_size", "5MB")
    assert code == 0, out
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2
    exported, converted = (
        load_exported(saved.folder / "hf").state_dict(),
        load_exported(tmp_path / "hf").state_dict(),
    )
    assert all((converted[name] == weight).all() for name, weight in exported.items())
    code, out = convert(saved.folder, "--to", "hf", tmp_path / "hf")
    assert code == 2 and "exists" in out


def test_to_torch(saved, convert, tmp_path):
    import torch

    code, out = convert(saved.folder, "--to", "torch", tmp_path / "torch")
    assert code == 0, out
    weights = torch.load(tmp_path / "torch" / "model.pt", weights_only=True)
    model = load_exported(saved.folder / "hf")
    assert all((weights[name] == weight).all() for name, weight in model.named_parameters())
    optimizer = torch.load(tmp_path / "torch" / "optimizer.pt", weights_only=True)
    assert (
        optimizer["step"] == 2
        and optimizer["exp_avg"].keys() == optimizer["exp_avg_sq"].keys() == weights.keys()
    )
    assert all(moment.abs().max() > 0 for moment in optimizer["exp_avg_sq"].values())


def test_a_damaged_or_wrong_source_is_refused(saved, convert, tmp_path):
    copy = shutil.copytree(saved.folder / "checkpoints", tmp_path / "copy")
    file = next(copy.rglob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for args, said in [
        ((copy, "--inspect"), "damaged"),
        ((tmp_path / "no", "--inspect"), "no such folder"),
        ((saved.folder, "--to", "hf"), "OUT"),
        ((PROJECT / "docs", "--inspect"), "contains no checkpoint"),
        ((PROJECT / "docs", "--to", "checkpoint", tmp_path / "x"), "Trainer"),
    ]:
        code, out = convert(*args)
        assert code == 2 and said in out, out
    assert not (tmp_path / "x").exists()


DEEPSPEED = """
import json, sys, torch, deepspeed
from importlib import import_module
from transformers import AutoModelForCausalLM
config, model, universal, save = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
model = AutoModelForCausalLM.from_pretrained(model)
groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01},
          {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # no compiler for what is unused
deepspeed.init_distributed("gloo")
engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
if universal != "-":
    engine.load_checkpoint(universal)
ids, losses = torch.arange(64).view(2, 32), []
for _ in range(4):
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    if len(losses) == 2 and save != "-":
        engine.save_checkpoint(save, tag="two")
print("LOSSES", json.dumps(losses))
"""


@pytest.fixture
def plain_deepspeed(saved):
    """plain_deepspeed(stage, universal, save, ranks): losses of four steps of a program that knows
    DeepSpeed only.
    """

    def run(stage, universal="-", save="-", ranks=1):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        }
        if universal != "-":
            config["checkpoint"] = {"load_universal": True}
        command = [
            sys.executable,
            "-c",
            DEEPSPEED,
            json.dumps(config),
            saved.folder / "hf",
            universal,
            save,
        ]
        env = {
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "DS_ACCELERATOR": "cpu",
        }
        processes = [start(command, {**env, "RANK": str(rank)}) for rank in range(ranks)]
        outputs = [finish(process, 200) for process in processes]
        lines = [line for line in outputs[0][0].splitlines() if line.startswith("LOSSES")]
        assert lines, outputs
        return json.loads(lines[0].split(" ", 1)[1])

    return run


def plain_pytorch(folder, hf, lr):
    """The same four steps from `--to torch`'s files, by PyTorch alone."""
    import torch

    model, state = load_exported(hf).train(), torch.load(folder / "optimizer.pt", weights_only=True)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    for name, parameter in named.items():
        optimizer.state[parameter] = {
            "step": torch.tensor(float(state["step"])),
            "exp_avg": state["exp_avg"][name],
            "exp_avg_sq": state["exp_avg_sq"][name],
        }
    ids, losses = torch.arange(64).view(2, 32), []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_deepspeed_goes_on_from_a_universal_folder(saved, convert, plain_deepspeed, tmp_path):
    """Weights, moments and Adam's step: without one of them the second loss would be another."""
    assert convert(saved.folder, "--to", "torch", tmp_path / "torch")[0] == 0
    assert convert(saved.folder, "--to", "deepspeed-universal", tmp_path / "universal")[0] == 0
    manifest = json.loads(
        (saved.folder / "checkpoints" / "step-00000002" / "manifest.json").read_text()
    )
    wanted = plain_pytorch(tmp_path / "torch", saved.folder / "hf", lr=manifest["groups"][0]["lr"])
    assert wanted[-1] < wanted[0] - 0.1
    assert_close(plain_deepspeed(2, universal=tmp_path / "universal"), wanted, 1e-4)
    # DeepSpeed 0.19.8 gives all groups of stage 3 one tensor for the step, which torch's AdamW then
    # counts up for each.
    assert_close(plain_deepspeed(3, universal=tmp_path / "universal")[:2], wanted[:2], 1e-4)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_start_from_a_checkpoint_that_deepspeed_made(
    script, saved, convert, plain_deepspeed, tmp_path, stage
):
    """On two ranks. PyTorch alone continues with the losses of DeepSpeed, and so does a run."""
    import torch

    losses = plain_deepspeed(stage, save=tmp_path / "native", ranks=2)
    assert losses[-1] < losses[0] - 0.1
    code, out = convert(tmp_path / "native", "--to", "checkpoint", tmp_path / "start")
    assert code == 2 and "--trust_checkpoint" in out and "pickle" in out
    arguments = ("--to", "checkpoint", tmp_path / "start", "--trust_checkpoint")
    code, out = convert(tmp_path / "native", *arguments)
    assert code == 0, out
    manifest = json.loads((tmp_path / "start" / "manifest.json").read_text())
    assert manifest["counters"]["step"] == manifest["adam_step"] == 2

    code, out = convert(tmp_path / "start", "--to", "torch", tmp_path / "torch")
    assert code == 0, out
    model = load_exported(saved.folder / "hf")
    weights = torch.load(tmp_path / "torch" / "model.pt", weights_only=True)
    state = torch.load(tmp_path / "torch" / "optimizer.pt", weights_only=True)
    for name, weight in model.state_dict().items():
        if name in weights:  # tied weights are stored under one name; stage 3 keeps them flat
            weight.copy_(weights[name].view_as(weight))
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind][name] = state[kind][name].view_as(weight)
    model.save_pretrained(tmp_path / "hf")
    torch.save(state, tmp_path / "torch" / "optimizer.pt")
    continued = plain_pytorch(tmp_path / "torch", tmp_path / "hf", lr=1e-3)
    assert_close(continued[:2], losses[2:], 1e-4)

    run = script(
        *WORK,
        "--strategy",
        "zero3",
        "--max_steps",
        "3",
        "--resume",
        tmp_path / "start",
        "--save_every",
        "3",
        launcher="torchrun",
        ranks=2,
    )
    manifest = json.loads(
        (run.folder / "checkpoints" / "step-00000003" / "manifest.json").read_text()
    )
    assert manifest["counters"]["step"] == manifest["adam_step"] == 3
    for file in (tmp_path / "native" / "two").glob("*_optim_states.pt"):
        file.write_bytes(b"0")
    code, out = convert(tmp_path / "native", *arguments[:2], tmp_path / "x", "--trust_checkpoint")
    assert code == 2 and out.count("❌") == 1 and "ds_to_universal" in out, out


def test_start_from_a_universal_folder(script, saved, convert, tmp_path):
    """It is data, so it needs no trust; it starts a new run, with the moments of the old one."""
    assert convert(saved.folder, "--to", "deepspeed-universal", tmp_path / "universal")[0] == 0
    code, out = convert(tmp_path / "universal", "--to", "checkpoint", tmp_path / "start")
    assert code == 0, out
    manifest = json.loads((tmp_path / "start" / "manifest.json").read_text())
    assert manifest["counters"]["step"] == 0 and manifest["adam_step"] == 2
    for name in ("start", "saved"):
        source = tmp_path / "start" if name == "start" else saved.folder
        assert convert(source, "--to", "torch", tmp_path / f"{name}-torch")[0] == 0
    for file in ("model.pt", "optimizer.pt"):
        ours, theirs = (
            load_tensors(tmp_path / f"{name}-torch" / file) for name in ("start", "saved")
        )
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            pairs = [(ours[key], value)]
            if isinstance(value, dict):
                pairs = [(ours[key][name], tensor) for name, tensor in value.items()]
            assert all((a == b) if isinstance(b, int) else (a == b).all() for a, b in pairs), key
