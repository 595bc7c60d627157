"""The settings, described once; run files (--config), what overrides them, --print_config."""

import dataclasses
from typing import get_args, get_origin, get_type_hints

import pytest
from conftest import PROJECT

from distributed_training.cli.flags import shown_flags
from distributed_training.cli.parse import output_dir_of, parse_arguments, read_command_line
from distributed_training.cli.run_file import as_yaml
from distributed_training.errors import UserError
from distributed_training.settings.data import Dataset, choose_seq_length
from distributed_training.settings.fields import flags_of
from distributed_training.settings.settings import SECTION_OF, SECTIONS


def test_settings_are_frozen():
    settings = parse_arguments(["--lr", "1e-3"])
    with pytest.raises(AttributeError):
        settings.training.lr = 1
    copy = settings.replace(seq_length=64)
    assert (copy.data.seq_length, copy.training.lr) == (64, 1e-3)
    assert settings.data.seq_length is None


@pytest.mark.parametrize("section", SECTIONS.values())
def test_a_value_has_the_type_of_its_field(section):
    """Only a field without a default (COMPUTED) may have None in the parser and not in its type."""
    hints = get_type_hints(section)
    for field in flags_of(section):
        default, kinds = field.metadata["default"], get_args(hints[field.name])
        is_computed = field.default is dataclasses.MISSING
        assert field.metadata["help"]
        if default is None:
            assert is_computed or type(None) in kinds, field.name
        else:
            plain = (tuple,) if get_origin(hints[field.name]) is tuple else kinds
            assert isinstance(default, plain or hints[field.name]), field.name


def test_default_of_seq_length():
    assert choose_seq_length(None, "tiny-gpt2", None) == 256
    assert choose_seq_length(None, "gpt2", 1024) == 512
    assert choose_seq_length(None, "gpt2", 128) == 128
    with pytest.raises(UserError, match="more than the 64 positions"):
        choose_seq_length(65, "gpt2", 64)


def test_home_folder_in_a_path(monkeypatch, tmp_path):
    """Values of a run file never see a shell."""
    monkeypatch.setenv("HOME", "/home/somebody")
    (tmp_path / "run.yaml").write_text("output_dir: ~/runs\ntext_column: ~x\n")
    settings = parse_arguments(["--config", str(tmp_path / "run.yaml"), "--cache_dir=~/x"])
    assert settings.data.cache_dir == "/home/somebody/x"  # bash leaves --cache_dir=~/x as it is
    assert (settings.output.output_dir, settings.data.text_column) == ("/home/somebody/runs", "~x")


STAGE3 = f"{PROJECT}/ds_config_stage3.json"


@pytest.fixture
def read(tmp_path):
    """read(text, *flags) -> the command line with a run file and flags."""

    def parse(text, *flags):
        (tmp_path / "run.yaml").write_text(text)
        return read_command_line(["--config", str(tmp_path / "run.yaml"), *flags])

    return parse


@pytest.mark.parametrize(
    "text, values",
    [
        ("training:\n  micro_batch_size: 2\n  lr: 1e-4", {"batch_size": 2, "lr": 1e-4}),
        ("fp16: false\nbf16: true", {"precision": "bf16"}),
        ("save_strategy: no\neval_strategy: no", {"eval": False, "save_every": None}),
        ("resume_from_checkpoint: false", {"resume": None}),
        ("dataset: ['a:1', 'b:2']", {"dataset": (Dataset("a", "1"), Dataset("b", "2"))}),
        ('{"learning_rate": 1e-3, "do_train": true}', {"lr": 1e-3}),  # run_clm.py's JSON
        ("fsdp: [full_shard, auto_wrap]", {"strategy": "fsdp"}),
        (f"deepspeed: {STAGE3}", {"strategy": "zero3", "ds_config": STAGE3}),
        (f"use_deepspeed: true\ndeepspeed_config: {STAGE3}", {"strategy": "zero3"}),
        ("output_dir: --lr", {"output_dir": "--lr"}),
        ("generate: The", {"generate": ("The",)}),
        ("generate: ['a, b', -c]", {"generate": ("a, b", "-c")}),
        ("generate: ''", {"generate": ()}),
        # What YAML 1.1 would read as true, 8, 90, 181, 1.1, a date, false and 1e-4 as a text.
        ("generate: yes\nseed: 010", {"generate": ("yes",), "seed": 10}),
        ("output_dir: 1:30", {"output_dir": "1:30"}),
        ("generate: [1.10, no, True, 1_0]", {"generate": ("1.10", "no", "True", "1_0")}),
        ("text_column: 2026-11-28\nmixed_precision: no", {"text_column": "2026-11-28"}),
        ("model: !!int 010\nlr: 1e-4", {"model": "010", "lr": 1e-4}),
        ("compile: yes\nquiet: True\neval: FALSE", {"compile": True, "quiet": True, "eval": False}),
        ("text_column: ~\neval_split: NULL\nmodel:", {"text_column": None, "eval_split": None}),
        ("generate: &text a\ntext_column: *text", {"text_column": "a"}),
    ],
)
def test_run_file(read, text, values):
    settings = read(text).settings
    assert {name: settings.flags()[name] for name in values} == values


@pytest.mark.parametrize(
    "text, flags, values",
    [
        ("learning_rate: 1", ["--lr", "2"], {"lr": 2}),
        ("bf16: true", ["--precision", "fp32"], {"precision": "fp32"}),
        (f"deepspeed: {STAGE3}", ["--strategy=dp"], {"strategy": "dp"}),
        ("no_eval: true", ["--eval"], {"eval": True}),
        ("dataset: [a:1, b:2]", ["--dataset", "c"], {"dataset": (Dataset("c"),)}),
        ("generate: [a, b]", ["--generate", "c", "--generate=d"], {"generate": ("c", "d")}),
    ],
)
def test_the_command_line_overrides_the_file(read, text, flags, values):
    settings = read(text, *flags).settings
    assert {name: settings.flags()[name] for name in values} == values


@pytest.mark.parametrize(
    "text, says",
    [
        ("lerning_rate: 1", "run.yaml: unknown argument --lerning_rate: .* --learning_rate"),
        ("training:\n  batch_size: many", "run.yaml: argument --batch_size.*: many is not"),
        ("lr: {a: 1}", "lr cannot have nested"),
        ("model: a: [", "line 1"),
        ("dataset: [a.txt, --lr=9]", "dataset cannot be"),
        ("lr: 1\nseed: 2\nlr: 1", "run.yaml: the key lr occurs twice"),
        ("training:\n  lr: 1\n  lr: 2", "the key lr occurs twice"),
        ("lr: 1\ntraining:\n  lr: 2", "lr and lr set the same flag"),
        ("lr: 1\nlearning_rate: 2", "lr and learning_rate set the same flag"),
        ("config: other.yaml", "run.yaml: config cannot be"),
        ("generate: [{a: 1}]", "generate cannot have nested"),
        ("generate_every_eval: true", "--generate_every_eval needs --generate"),
        ("generate: a\ngenerate_every_eval: true\neval: false", "cannot be used together"),
        ("lr: " + "[" * 500 + "]" * 500, "nested"),
        ("rank_shares: 3:1", "3:1 is not a number"),
        ("compile: on", "on is neither true nor false"),
        ("resume: yes", "yes: write true or false, or a path"),
        ("seed: 0x10", "0x10 is not a whole number"),
        ("generate: [a, ~]", "generate has an empty value"),
    ],
)
def test_run_file_that_is_refused(read, text, says):
    with pytest.raises(UserError, match=says):
        read(text)


def test_no_tag_of_a_run_file_is_executed(read, tmp_path):
    with pytest.raises(UserError):
        read(f"model: !!python/object/apply:os.mkdir ['{tmp_path}/executed']")
    assert not (tmp_path / "executed").exists()


PRINTED = (
    (),
    ("--resume", "--output_dir", "0x10", "--no_eval", "--generate", "a: b\n# c"),
    ("--dataset", "a.txt:0.3", "b.txt:0.7", "--isolate_documents", "--lora_r", "4"),
    ("--generate", "The", "--generate", "a: b\n# c", "--generate", "-", "--generate_every_eval"),
    ("--fsdp", "shard_grad_op offload", "--report_to", "tensorboard,wandb"),
    ("--strategy", "zero3", "--bf16", "--save_strategy", "epoch", "--eval_strategy", "steps"),
    ("--simulate_gpus", "4"),
)


@pytest.mark.parametrize("flags", PRINTED)
def test_printed_settings_are_a_run_file(read, flags):
    line = read_command_line([*flags])
    first, again = line.settings, read(as_yaml(line.settings.flags(), line.sources)).settings
    unprinted = {"config", "bf16", "do_eval", "save_strategy", "eval_strategy"}
    for name in SECTION_OF.keys() - unprinted:
        section = SECTION_OF[name]
        assert getattr(getattr(again, section), name) == getattr(getattr(first, section), name)


def test_one_prompt_is_not_in_a_list():
    """As in the results of earlier versions."""
    for flags, shown in (
        (["--generate", "a"], "a"),
        (["--generate=a", "--generate=b"], ["a", "b"]),
    ):
        assert shown_flags(read_command_line(flags).settings.flags())["generate"] == shown


def test_printed_settings_name_their_sources(read, tmp_path):
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}'
    )
    text = f"micro_batch_size: 2\nseed: 3\nds_config: {tmp_path}/ds.json"
    line = read(text, "--bf16", "--check")
    lines = as_yaml(line.settings.flags(), line.sources).splitlines()
    file, ds = f"{tmp_path}/run.yaml", f"{tmp_path}/ds.json"
    for line in (
        f"batch_size: 2  # {file}: micro_batch_size",
        f"seed: 3  # {file}",
        "precision: bf16  # --bf16",
        f"max_grad_norm: 0.5  # {ds}: gradient_clipping",
        f"strategy: zero2  # {ds}: zero_optimization",
        "ddp_timeout: 60  # --check",
        "weight_decay: 0.01  # default",
    ):
        assert line in lines, "\n".join(lines)


def test_output_dir_of_a_command_line(tmp_path):
    (tmp_path / "run.yaml").write_text("output_dir: a\nlearning_rate: 1")
    config = ["--config", str(tmp_path / "run.yaml"), "--lr", "2"]
    assert output_dir_of(config) == "a" and output_dir_of([*config, "--output_dir=b"]) == "b"
    assert output_dir_of([]) == ""
