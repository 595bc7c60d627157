"""Each file that is read, with damaged values under each key: no exception but for the user."""

import importlib.util
import json

import pytest
from damaged_values import errors_of
from written_runs import RESULTS, save

from distributed_training.checkpoints.format import FORMAT_VERSION
from distributed_training.checkpoints.verify import read_manifest
from distributed_training.cli.parse import parse_arguments
from distributed_training.data.rows import RowOptions, read_row
from distributed_training.errors import UserError
from distributed_training.files.atomic import digest_of_json
from distributed_training.files.weight_files import weight_files
from distributed_training.memory.estimate import predict
from distributed_training.memory.find_architecture import find_architecture
from distributed_training.strategies.deepspeed.options import ModelSizes, complete_ds_config
from distributed_training.trained import source
from distributed_training.workload.workload import Workload

DS = {
    **{"train_batch_size": 4, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0},
    **{"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "aio": {"queue_depth": 8}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto"}},
    "zero_optimization": {
        **{"stage": 3, "reduce_bucket_size": "auto"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "auto"},
        "offload_param": {"device": "nvme", "nvme_path": "auto", "buffer_size": "auto"},
    },
    "timers": {"throughput": {"enabled": False}},
}
FSDP = {"fsdp_sharding_strategy": "FULL_SHARD", "mixed_precision": "BF16", "other": 1}
FSDP |= {"transformer_layer_cls_to_wrap": ["A"], "offload_params": True}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
LLAMA = {
    **{"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "vocab_size": 50},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"tie_word_embeddings": False, "hidden_act": "silu", "max_position_embeddings": 64},
}
MANIFEST = {
    "format_version": FORMAT_VERSION,
    "counters": {"step": 1, "best": None, "rank_sequences": [{"from_step": 1, "sequences": [1]}]},
    "identity": {"hard": {"parameters": 4}, "soft": {"model": "x"}, "told": {"strategy": "dp"}},
    **{"adam_step": 1, "shapes": {"w": [2, 2]}, "files": {"f": {"bytes": 1, "sha256": "x"}}},
    "pieces": [{"name": "w", "start": 0, "numel": 4, "moments": True, "file": "f"}],
}
CHAT = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b", "weight": 1},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.mark.parametrize(
    "flag, content, flags", [("ds_config", DS, []), ("fsdp_config", FSDP, ["--strategy", "fsdp"])]
)
def test_files_of_strategies(tmp_path, flag, content, flags):
    def read(changed):
        (tmp_path / "file.json").write_text(json.dumps(changed))
        strategy = parse_arguments([f"--{flag}={tmp_path}/file.json", *flags]).strategy
        if flag == "ds_config":
            complete_ds_config(strategy.config, "fp16", ModelSizes(64, 10**6, 10**5, True), 2, "/x")

    assert not errors_of(content, read)


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity"])
def test_a_number_beyond_a_double(tmp_path, number):
    for key in ("gradient_clipping", "train_batch_size", "reduce_bucket_size"):
        text = f'{{"zero_optimization": {{"stage": 2}}, "{key}": {number}}}'
        (tmp_path / "ds.json").write_text(text)
        try:
            parse_arguments([f"--ds_config={tmp_path}/ds.json"])
        except UserError as error:
            assert "ds.json" in str(error)


@pytest.mark.parametrize("config", [GPT2, LLAMA])
def test_config_of_a_model_that_is_planned(tmp_path, config):
    def read(changed):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        predict(Workload(find_architecture(str(tmp_path)), 2), "zero3")

    assert not errors_of(config, read)


def test_manifest_of_a_checkpoint(tmp_path):
    def read(changed):
        changed = json.loads(json.dumps(changed))
        digest = {"sha256": digest_of_json(changed)}
        (tmp_path / "manifest.json").write_text(json.dumps({**changed, **digest}))
        read_manifest(tmp_path)

    assert not errors_of(MANIFEST, read)


def test_files_of_a_model_folder(tmp_path, monkeypatch):
    def on_hub(name):
        raise UserError(name)

    monkeypatch.setattr(source, "_on_hub", on_hub)

    def read_index(changed):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(changed))
        weight_files(tmp_path)

    def read_adapters(changed):
        (tmp_path / "adapter_config.json").write_text(json.dumps(changed))
        source.find_source(str(tmp_path))

    def read_export(changed):
        source.find_source(str(save(tmp_path / "run", {**RESULTS, **changed}, [])))

    (tmp_path / "adapter_model.safetensors").write_text("x")
    assert not errors_of({"weight_map": {"w": "adapter_model.safetensors"}}, read_index)
    assert not errors_of({"export": {"folder": "hf"}, "flags": {"export_hf": "x"}}, read_export)
    if importlib.util.find_spec("peft"):
        assert not errors_of({"base_model_name_or_path": "./base"}, read_adapters)


@pytest.mark.parametrize("row", [{"text": "a"}, {"prompt": "a", "completion": "b"}, CHAT])
def test_rows_of_a_dataset(row):
    options = RowOptions(chat_template=TEMPLATE)
    assert not errors_of({"row": row}, lambda changed: read_row(changed.get("row"), "x:1", options))
