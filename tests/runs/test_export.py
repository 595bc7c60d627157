"""What a run has trained is a Hugging Face model, whatever strategy trained it."""

import json
import shutil
import sys

import pytest
from conftest import PROJECT, assert_close, finish, free_port, load_exported, start

from support.checkpoints.foreign import load_tensors

CONVERT = [sys.executable, PROJECT / "scripts" / "convert_checkpoint.py"]
WORK = "--seq_length 32 --num_samples 8 --batch_size 2 --no_eval".split()
TWO = {"launcher": "torchrun", "ranks": 2}


def test_export_goes_where_and_how_it_is_asked_for(script, llama, text_file, tmp_path):
    import torch
    from transformers import AutoTokenizer

    mine, work = tmp_path / "mine", [*WORK, "--model", llama, "--dataset", text_file]
    flags = f"--strategy zero2 --export_hf {mine} --export_dtype bf16".split()
    run = script(*work, *flags, **TWO)
    model = load_exported(mine)
    assert model.dtype == torch.bfloat16 and model.config.use_cache
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    tokens = AutoTokenizer.from_pretrained(mine)("the lazy dog")["input_ids"]
    assert tokens == AutoTokenizer.from_pretrained(llama)("the lazy dog")["input_ids"]
    card = (mine / "README.md").read_text()
    assert f"{run.results['parameters']:,} parameters" in card and "zero2" in card
    assert f"{run.results['train_loss_last']:.4g}" in card
    assert not (run.folder / "hf").exists() and run.results["export"]["folder"] == str(mine)
    again = script(*work, "--export_hf", mine, ok=False)
    assert again.code == 2 and "--overwrite" in again.error
    for target in (llama, ".", text_file.parent):  # the model, the current folder, the data
        refused = script(*work, "--export_hf", target, "--overwrite", ok=False)
        assert refused.code == 2 and "--export_hf" in refused.error
    assert text_file.exists() and (llama / "config.json").exists()
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.txt").write_text("years of work")
    other = script(*work, "--export_hf", tmp_path / "papers", "--overwrite", ok=False)
    assert other.code == 2 and (tmp_path / "papers" / "thesis.txt").exists()


# --------------------------------------------------------------------------------------- converting


@pytest.fixture(scope="module")
def saved(script):
    """Two ranks, zero2, a checkpoint at the end; and the export of the same moment."""
    return script(*WORK, *"--precision fp32 --strategy zero2 --save_every 2".split(), **TWO)


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
    exported, converted = map(load_exported, (saved.folder / "hf", tmp_path / "hf"))
    converted = converted.state_dict()
    assert all((converted[name] == w).all() for name, w in exported.state_dict().items())
    code, out = convert(saved.folder, "--to", "hf", tmp_path / "hf")
    assert code == 2 and "exists" in out


def test_to_torch(saved, convert, tmp_path):
    code, out = convert(saved.folder, "--to", "torch", tmp_path / "torch")
    assert code == 0, out
    weights, optimizer = (
        load_tensors(tmp_path / "torch" / f"{n}.pt") for n in ("model", "optimizer")
    )
    model = load_exported(saved.folder / "hf")
    assert all((weights[name] == weight).all() for name, weight in model.named_parameters())
    assert optimizer["step"] == 2 and optimizer["exp_avg"].keys() == weights.keys()
    assert optimizer["exp_avg_sq"].keys() == weights.keys()
    assert all(moment.abs().max() > 0 for moment in optimizer["exp_avg_sq"].values())


def test_an_export_to_a_full_disk_goes_to_the_temporary_folder(script, disk, tmp_path):
    flags = "--seq_length 32 --max_steps 1 --no_eval --no_save --output_dir".split()
    run = script(*flags, disk(2) / "out", env={"TMPDIR": str(tmp_path)}, ok=False)
    [folder] = tmp_path.glob("distributed_training_export_*")
    assert run.code == 1 and "No space left" in run.error and str(folder) in run.error
    assert load_exported(folder)


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
        ((saved.folder, "--to", "hf", tmp_path / "x", "--max_shard_size", "big"), "5GB or 500MB"),
        ((PROJECT / "docs", "--to", "checkpoint", tmp_path / "x"), "Trainer"),
    ]:
        code, out = convert(*args)
        assert code == 2 and said in out, out
    assert not (tmp_path / "x").exists()


DEEPSPEED = """
import json, sys, torch, deepspeed
from importlib import import_module
from transformers import AutoModelForCausalLM
config, model, save = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
model = AutoModelForCausalLM.from_pretrained(model)
groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01},
          {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # no compiler for what is unused
deepspeed.init_distributed("gloo")
engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
ids, losses = torch.arange(64).view(2, 32), []
for _ in range(4):
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    if len(losses) == 2:
        engine.save_checkpoint(save, tag="two")
print("LOSSES", json.dumps(losses))
"""


@pytest.fixture
def plain_deepspeed(saved):
    """plain_deepspeed(stage, save, ranks): losses of four steps of a program that knows
    DeepSpeed only.
    """

    def run(stage, save, ranks):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        }
        command = [sys.executable, "-c", DEEPSPEED, json.dumps(config)]
        command += [saved.folder / "hf", save]
        env = {"LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"}
        processes = [start(command, {**env, "RANK": str(rank)}) for rank in range(ranks)]
        outputs = [finish(process, 200) for process in processes]
        lines = [line for line in outputs[0][0].splitlines() if line.startswith("LOSSES")]
        assert lines, outputs
        return json.loads(lines[0].split(" ", 1)[1])

    return run


def plain_pytorch(folder, hf, lr):
    """The same four steps from `--to torch`'s files, by PyTorch alone."""
    import torch

    model = load_exported(hf).train()
    weights, state = load_tensors(folder / "model.pt"), load_tensors(folder / "optimizer.pt")
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    for name, parameter in named.items():  # stage 3 keeps tensors flat
        parameter.data.copy_(weights[name].view_as(parameter))
        moments = {k: state[k][name].view_as(parameter).clone() for k in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(float(state["step"])), **moments}
    ids, losses = torch.arange(64).view(2, 32), []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def manifest_of(checkpoint):
    return json.loads((checkpoint / "manifest.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_start_from_a_checkpoint_that_deepspeed_made(
    script, saved, convert, plain_deepspeed, tmp_path, stage
):
    """On two ranks. PyTorch alone continues with the losses of DeepSpeed, and so does a run."""
    native, imported = tmp_path / "native", tmp_path / "start"
    losses = plain_deepspeed(stage, save=native, ranks=2)
    assert losses[-1] < losses[0] - 0.1
    code, out = convert(native, "--to", "checkpoint", imported)
    assert code == 2 and "--trust_checkpoint" in out and "pickle" in out
    code, out = convert(native, "--to", "checkpoint", imported, "--trust_checkpoint")
    assert code == 0, out
    manifest = manifest_of(imported)
    assert manifest["counters"]["step"] == manifest["adam_step"] == 2

    code, out = convert(imported, "--to", "torch", tmp_path / "torch")
    assert code == 0, out
    continued = plain_pytorch(tmp_path / "torch", saved.folder / "hf", lr=1e-3)
    assert_close(continued[:2], losses[2:], 1e-4)

    flags = f"--strategy zero3 --max_steps 3 --resume {imported} --save_every 3".split()
    run = script(*WORK, *flags, **TWO)
    manifest = manifest_of(run.folder / "checkpoints" / "step-00000003")
    assert manifest["counters"]["step"] == manifest["adam_step"] == 3
    for file in (native / "two").glob("*_optim_states.pt"):
        file.write_bytes(b"0")
    code, out = convert(native, "--to", "checkpoint", tmp_path / "x", "--trust_checkpoint")
    assert code == 2 and out.count("❌") == 1 and "ds_to_universal" in out, out
