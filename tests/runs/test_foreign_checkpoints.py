"""Training continues from the checkpoints of other programs, under any strategy."""

import json
import shutil

import pytest
from conftest import assert_close, finish, launcher_command, load_exported

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
def gpt2():
    """A GPT-2 with tied embeddings, Conv1D, biases and norms, without dropout."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    settings = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "bos_token_id"), 0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **settings, eos_token_id=0))


@pytest.fixture(scope="module")
def trainer(gpt2, tiny_tokenizer, tmp_path_factory):
    """The output folder of four steps of Trainer, with checkpoints after 2 and 4, and its losses."""
    import copy

    from transformers import AutoTokenizer, Trainer, TrainingArguments, default_data_collator

    folder = tmp_path_factory.mktemp("trainer")
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer)
    tokens = [*tokenizer(SEQUENCE)["input_ids"], tokenizer.eos_token_id]
    assert len(tokens) == 32
    arguments = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        save_steps=SAVED,
        logging_steps=1,
        per_device_train_batch_size=2,
        learning_rate=LR,
        weight_decay=0.1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    # Trainer divides the loss by the number of labels, and the first label has no loss.
    labels = [-100, *tokens[1:]]
    program = Trainer(
        copy.deepcopy(gpt2),
        arguments,
        train_dataset=[{"input_ids": tokens, "labels": labels}] * 16,
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    program.train()
    losses = [record["loss"] for record in program.state.log_history if "loss" in record]
    return folder, losses


@pytest.mark.parametrize(
    ("strategy", "ranks", "flags"),
    [
        ("dp", 1, ["--isolate_documents"]),  # changes nothing: each sequence is one document
        ("zero3", 2, []),
        pytest.param("fsdp", 2, [], marks=pytest.mark.soak),
    ],
)
def test_training_continues_a_checkpoint_of_trainer(
    script, convert, trainer, tmp_path, data, strategy, ranks, flags
):
    """Weights, moments, Adam's step, the step and the schedule: the losses and final weights."""
    folder, losses = trainer
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
    folder, _ = trainer
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
    "no state": (lambda folder: (folder / "trainer_state.json").unlink(), "trainer_state.json"),
    "no optimizer": (lambda folder: (folder / "optimizer.pt").unlink(), "optimizer.pt"),
    "truncated": (lambda f: (f / "model.safetensors").write_bytes(b"\0" * 99), "not a checkpoint"),
    "objects in the optimizer": (write_pickle, "Python objects"),
    "no config.json": (lambda folder: (folder / "config.json").unlink(), "config.json"),
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


# --------------------------------------------------------------------------------------------- FSDP

FSDP = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
for layer in (*model.transformer.h, model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ids = torch.arange(64).view(2, 32)
for _ in range(2):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
weights = get_model_state_dict(model)
states = get_optimizer_state_dict(model, optimizer)
state = {"app": {"model": weights, "optim": states}}  # as in PyTorch's tutorial
dcp.save(state, checkpoint_id=sys.argv[2] + "/one")
# accelerate's layout
dcp.save({"model": weights}, checkpoint_id=sys.argv[2] + "/two/pytorch_model_fsdp_0")
dcp.save({"optimizer": states}, checkpoint_id=sys.argv[2] + "/two/optimizer_0")
expected = {"weight": {name: weight.full_tensor() for name, weight in weights.items()}}
for kind in ("exp_avg", "exp_avg_sq"):
    expected[kind] = {name: s[kind].full_tensor() for name, s in states["state"].items()}
if dist.get_rank() == 0:
    torch.save(expected, sys.argv[2] + "/expected.pt")
dist.destroy_process_group()
"""


def test_sharded_state_of_fsdp(begin, convert, gpt2, tmp_path):
    import torch

    gpt2.save_pretrained(tmp_path / "model")
    (tmp_path / "program.py").write_text(FSDP)
    command = [*launcher_command("torchrun", 2), tmp_path / "program.py"]
    process = begin([*command, tmp_path / "model", tmp_path])
    out, err = finish(process, 120)
    assert process.returncode == 0, out + err
    expected = torch.load(tmp_path / "expected.pt")
    for name in ("one", "two"):
        code, out = convert(tmp_path / name, "--to", "checkpoint", tmp_path / f"no-{name}")
        assert code == 2 and "--trust_checkpoint" in out and "pickle" in out
        start = tmp_path / f"start-{name}"
        code, out = convert(tmp_path / name, "--to", "checkpoint", start, "--trust_checkpoint")
        assert code == 0, out
        manifest = json.loads((start / "manifest.json").read_text())
        assert manifest["counters"]["step"] == manifest["adam_step"] == SAVED
        assert convert(start, "--to", "torch", tmp_path / f"torch-{name}")[0] == 0
        optimizer = torch.load(tmp_path / f"torch-{name}" / "optimizer.pt")
        saved = {**optimizer, "weight": torch.load(tmp_path / f"torch-{name}" / "model.pt")}
        for kind, tensors in expected.items():
            assert all(torch.equal(saved[kind][n], tensor) for n, tensor in tensors.items())
    for damage, says in [
        (lambda: next((tmp_path / "one").glob("*.distcp")).write_bytes(b"0"), "cannot be read"),
        (lambda: (tmp_path / "one" / ".metadata").write_bytes(b"0"), ".metadata"),
    ]:
        damage()
        command = (tmp_path / "one", "--to", "checkpoint", tmp_path / "x", "--trust_checkpoint")
        code, out = convert(*command)
        assert code == 2 and out.count("❌") == 1 and says in out, out
