"""Training continues from the checkpoints of other programs, under any strategy."""

import json
import shutil

import pytest
from conftest import assert_close, finish, launcher_command, load_exported, soak

pytestmark = pytest.mark.slow

LR, STEPS, SAVED = 1e-2, 4, 2
# Every sequence has the same tokens, so the losses do not depend on the order of the data.
SEQUENCE = "0123456789ABCDEFGHIJKLMNOPQRSTU"
WORK = ["--seq_length", 32, "--max_steps", STEPS, "--lr", LR, "--weight_decay", 0.1, "--no_eval"]
WORK += ["--lr_scheduler", "linear", "--precision", "fp32"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "data.jsonl"
    file.write_text((json.dumps({"text": SEQUENCE}) + "\n") * 16)
    return file


@pytest.fixture(scope="module")
def trainer(tiny_tokenizer, tmp_path_factory):
    """Four steps of Trainer: its folder with checkpoints after 2 and 4, its losses, the tokens.

    The model is a GPT-2 with tied embeddings, Conv1D, biases and norms, without dropout.
    """
    import torch
    from transformers import (
        AutoTokenizer,
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainingArguments,
        default_data_collator,
    )

    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    settings = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "bos_token_id"), 0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **settings, eos_token_id=0))
    folder = tmp_path_factory.mktemp("trainer")
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer)
    tokens = [*tokenizer(SEQUENCE)["input_ids"], tokenizer.eos_token_id]
    assert len(tokens) == 32
    steps = {"max_steps": STEPS, "save_steps": SAVED, "logging_steps": 1}
    adam = {"learning_rate": LR, "weight_decay": 0.1, "per_device_train_batch_size": 2}
    arguments = TrainingArguments(
        str(folder), **steps, **adam, use_cpu=True, report_to="none", disable_tqdm=True
    )
    # Trainer divides the loss by the number of labels, and the first label has no loss.
    labels = [-100, *tokens[1:]]
    program = Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": tokens, "labels": labels}] * 16,
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    program.train()
    losses = [record["loss"] for record in program.state.log_history if "loss" in record]
    return folder, losses, tokens


@pytest.mark.parametrize(
    ("strategy", "ranks", "flags"),
    [
        ("dp", 1, ["--isolate_documents"]),  # changes nothing: each sequence is one document
        ("zero3", 2, []),
        soak("fsdp", 2, []),
    ],
)
def test_training_continues_a_checkpoint_of_trainer(
    script, convert, trainer, tmp_path, data, strategy, ranks, flags
):
    """Weights, moments, Adam's step, the step and the schedule: the losses and final weights."""
    folder, losses, _ = trainer
    imported = tmp_path / "imported"
    assert convert(folder / f"checkpoint-{SAVED}", "--to", "checkpoint", imported)[0] == 0
    flags += f"--model {folder}/checkpoint-{SAVED} --dataset {data} --resume {imported}".split()
    flags += f"--strategy {strategy} --batch_size {2 // ranks}".split()
    launcher = "torchrun" if ranks > 1 else "python"
    run = script(*WORK, *flags, launcher=launcher, ranks=ranks)
    assert [record["step"] for record in run.metrics if "loss" in record] == [3, 4]
    assert_close(run.losses, losses[SAVED:], 1e-4)
    expected = dict(load_exported(folder / f"checkpoint-{STEPS}").named_parameters())
    for name, weight in load_exported(run.folder / "hf").named_parameters():
        assert (weight - expected[name]).abs().max() < 1e-4, name  # an update is about 1e-2


def test_the_newest_checkpoint_of_an_output_folder(script, convert, trainer, data, tmp_path):
    folder, *_ = trainer
    assert convert(folder, "--to", "checkpoint", tmp_path / "start")[0] == 0
    manifest = json.loads((tmp_path / "start" / "manifest.json").read_text())
    assert manifest["counters"]["step"] == manifest["adam_step"] == STEPS
    # The folder itself is no checkpoint of this project, and the error says what to do.
    run = script("--dataset", data, "--resume", folder, ok=False)
    assert run.code == 2 and "convert_checkpoint.py" in run.error


def write_pickle(folder):
    import torch

    torch.save({"state": pytest.raises}, folder / "optimizer.pt")


BAD = {
    "no optimizer": (lambda folder: (folder / "optimizer.pt").unlink(), "optimizer.pt"),
    "truncated": (lambda f: (f / "model.safetensors").write_bytes(b"\0" * 99), "is damaged"),
    "objects in the optimizer": (write_pickle, "Python objects"),
    "adapters": (lambda folder: (folder / "adapter_config.json").touch(), "adapters only"),
}


@pytest.mark.parametrize(("damage", "says"), BAD.values(), ids=BAD)
def test_a_damaged_checkpoint_of_trainer_is_refused(convert, trainer, tmp_path, damage, says):
    copy = shutil.copytree(trainer[0] / f"checkpoint-{SAVED}", tmp_path / "copy")
    damage(copy)
    code, out = convert(copy, "--to", "checkpoint", tmp_path / "start")
    errors = [line for line in out.splitlines() if "❌" in line]
    assert code == 2 and len(errors) == 1 and says in errors[0], out
    assert not (tmp_path / "start").exists()


# ------------------------------------------------------------------------------- DeepSpeed and FSDP

DEEPSPEED = """
import json, sys, torch, deepspeed
from importlib import import_module
from transformers import AutoModelForCausalLM
model, tokens, save, stage = sys.argv[1:]
adam = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0, "torch_adam": True}}
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": int(stage)}}
config["gradient_clipping"] = 0  # DeepSpeed's default is 1.0
import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # no compiler for what is unused
deepspeed.init_distributed("gloo")
model = AutoModelForCausalLM.from_pretrained(model)
parameters = {"model_parameters": model.parameters(), "config": {**config, "optimizer": adam}}
engine, *_ = deepspeed.initialize(model=model, **parameters)
ids, losses = torch.tensor([json.loads(tokens)]), []
for _ in range(4):
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    if len(losses) == 2:
        engine.save_checkpoint(save + "/native", tag="two")
if engine.global_rank == 0:
    print("LOSSES", json.dumps(losses))
"""
FSDP = """
import json, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
model, tokens, save = sys.argv[1:]
dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(model)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
for layer in (*model.transformer.h, model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
ids, losses = torch.tensor([json.loads(tokens)]), []
for _ in range(4):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if len(losses) == 2:
        weights = get_model_state_dict(model)
        states = get_optimizer_state_dict(model, optimizer)
        state = {"app": {"model": weights, "optim": states}}  # as in PyTorch's tutorial
        dcp.save(state, checkpoint_id=save + "/tutorial")
        # accelerate's layout
        dcp.save({"model": weights}, checkpoint_id=save + "/accelerate/pytorch_model_fsdp_0")
        dcp.save({"optimizer": states}, checkpoint_id=save + "/accelerate/optimizer_0")
if dist.get_rank() == 0:
    print("LOSSES", json.dumps(losses))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("program", "args", "folders", "damaged", "says"),
    [
        pytest.param(DEEPSPEED, ["3"], ["native"], "two/*_optim_states.pt", "ds_to_universal"),
        soak(DEEPSPEED, ["2"], ["native"], "two/*_optim_states.pt", "ds_to_universal"),
        pytest.param(FSDP, [], ["accelerate", "tutorial"], "*.distcp", "cannot be read"),
    ],
)
def test_training_continues_a_checkpoint_of_two_ranks(
    script, begin, convert, trainer, data, tmp_path, program, args, folders, damaged, says
):
    """With the losses of the program that saved it. Its pickles are loaded on request only."""
    folder, _, tokens = trainer
    model = folder / f"checkpoint-{SAVED}"
    (tmp_path / "program.py").write_text(program)
    command = [*launcher_command("torchrun", 2), tmp_path / "program.py", model]
    process = begin([*command, json.dumps(tokens), tmp_path, *args], {"DS_ACCELERATOR": "cpu"})
    out, err = finish(process, 200)
    assert process.returncode == 0, out + err
    [losses] = [json.loads(line[7:]) for line in out.splitlines() if line.startswith("LOSSES")]
    assert losses[-1] < losses[0] - 0.1
    work = [*WORK, "--model", model, "--dataset", data, *"--batch_size 1 --strategy zero3".split()]
    work += "--lr_scheduler constant --weight_decay 0 --max_grad_norm 0 --resume".split()
    for folder in folders:
        command = (tmp_path / folder, "--to", "checkpoint", tmp_path / f"start-{folder}")
        code, out = convert(*command)
        assert code == 2 and "--trust_checkpoint" in out and "pickle" in out
        assert convert(*command, "--trust_checkpoint")[0] == 0
        run = script(*work, command[-1], launcher="torchrun", ranks=2)
        assert_close(run.losses, losses[SAVED:], 1e-4)
    for file in (tmp_path / folders[-1]).glob(damaged):
        file.write_bytes(b"0")
    code, out = convert(*command[:-1], tmp_path / "x", "--trust_checkpoint")
    assert code == 2 and out.count("❌") == 1 and says in out, out
