"""What runs have written: which settings explain a difference, and files that cannot be read."""

import json

import pytest
from written_runs import steps

from distributed_training.errors import UserError
from distributed_training.records.causes import EFFECT_OF
from distributed_training.records.metrics_reader import cut_at
from distributed_training.records.recorded_run import read_run
from distributed_training.records.replayed import marked_text

# Flags that change no loss, or only the data, whose digest is compared.
NO_EFFECT = """
    dataset dataset_config dataset_revision train_split include text_column prompt_column
    completion_column max_bad_rows cache_dir merge_lora nvme_path auto_micro_batch
    global_batch_size generate_every_eval
""".split()


def test_every_flag_that_can_change_a_loss_is_compared():
    from distributed_training.cli.flags import GROUPS

    groups = ("Model", "Data", "Training", "Strategy")
    flags = {name for group in groups for name in GROUPS[group]}
    assert flags - {*NO_EFFECT} <= EFFECT_OF.keys()


def test_a_resume_names_the_lines_that_it_removes(ours, capsys):
    """Not the half line of a run that was killed."""
    file = ours("a", steps()) / "metrics.jsonl"
    lines = file.read_text().splitlines()
    lines[1] = "\0" * 40
    file.write_text("\n".join(lines) + '\n{"step": 7, "lo')
    for notice in ("line 2 ", ""):
        cut_at(file, 5)
        assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 3, 4, 5]
        out, err = capsys.readouterr()
        assert notice in out + err and bool(out + err) == bool(notice)


def test_places_without_a_run(tmp_path):
    (tmp_path / "trainer_state.json").write_text('{"global_step": 3}')
    for place in (tmp_path / "trainer_state.json", tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError):
            read_run(place)


def test_the_tokens_with_the_largest_losses_are_marked():
    text = "x" * 400 + "bad" + "y" * 400
    one = {"text": text, "largest_losses": [{"position": 9, "start": 400, "end": 403, "loss": 9.0}]}
    assert "x⟦bad⟧y" in marked_text(one) and len(marked_text(one)) < 340
    assert marked_text({"text": "short", "largest_losses": []}) == "short"


def test_a_run_whose_tokenizer_begins_texts_can_be_read(ours):
    """The run signature has the ids of Llama's <s>, a list."""
    folder = ours("a", steps())
    file = folder / "results.json"
    content = json.loads(file.read_text())
    content["run_signature"] = {"hard": {"lora_r": 4}, "soft": {"document_start": [900]}}
    file.write_text(json.dumps(content))
    assert read_run(folder).results["run_signature"] == content["run_signature"]
    content["run_signature"]["soft"]["document_start"] = [[900]]
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="the type of run_signature"):
        read_run(folder)
