"""What a run has trained is a Hugging Face model, whatever strategy trained it."""

import shutil
import sys

import pytest
from conftest import PROJECT, finish, load_exported

from distributed_training.checkpoints.foreign import load_tensors

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
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.txt").write_text("years of work")
    # Without --overwrite; the model, the current folder, the data, other files.
    targets = [(mine, []), *((f, ["--overwrite"]) for f in (llama, ".", tmp_path / "papers"))]
    for target, overwrite in [*targets, (text_file.parent, ["--overwrite"])]:
        refused = script(*work, "--export_hf", target, *overwrite, ok=False)
        assert refused.code == 2 and "--export_hf" in refused.error
    assert text_file.exists() and (llama / "config.json").exists()
    assert load_exported(mine) and (tmp_path / "papers" / "thesis.txt").exists()


# --------------------------------------------------------------------------------------- converting


@pytest.fixture(scope="module")
def saved(script):
    """Two ranks, zero2, a checkpoint at the end; and the export of the same moment."""
    return script(*WORK, *"--precision fp32 --strategy zero2 --save_every 2".split(), **TWO)


def test_inspect_shows_step_strategy_ranks_and_tensors(saved, begin):
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
        ((PROJECT / "docs", "--inspect"), "contains no checkpoint"),
        ((saved.folder, "--to", "hf", tmp_path / "x", "--max_shard_size", "big"), "5GB or 500MB"),
        ((PROJECT / "docs", "--to", "checkpoint", tmp_path / "x"), "Trainer"),
    ]:
        code, out = convert(*args)
        assert code == 2 and said in out, out
    assert not (tmp_path / "x").exists()
