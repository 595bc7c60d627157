"""Attacks on what a user types and writes: flags, run files, DeepSpeed's and FSDP's JSON,
config.json, results.json.

What the parser alone can refuse runs in this process, in milliseconds; the rest starts the script,
and ends before torch is imported.
"""

import json
import os
import re
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from attacks import Attack, table
from conftest import PROJECT, Run

from support.cli.parse import parse_arguments
from support.errors import UserError

LONG = "a" * 5000
DIGITS = "9" * 5000
DEEP = 100_000
SPARE_SECONDS = (
    20  # for anything that runs in this process; a loop over a number of the user would take hours
)


def parsed(argv: list) -> Run:
    """What the parser makes of a command line, as a `Run`; its output is the resolved settings."""
    started = time.monotonic()
    try:
        args = parse_arguments([str(argument) for argument in argv])
        code, out, err = 0, json.dumps(vars(args), default=str), ""
    except UserError as error:
        code, out, err = error.exit_code, "", f"❌ {error}\n"
    assert time.monotonic() - started < SPARE_SECONDS
    assert len(err) < 1000 and err.count("\n") < 2, "one line, and not as long as what was typed"
    return Run(code, out, err, 0, Path())


def settings(run: Run) -> dict:
    return json.loads(run.out)


def flag(*args, says: str | None = None, **settled) -> Attack:
    """A row about flags alone; `settled` are settings that must come of them."""

    def holds(_folder, run):
        found = settings(run)
        assert {name: found[name] for name in settled} == settled

    shown = " ".join(args)
    shown = shown if len(shown) < 60 else shown[:40] + "…"
    return Attack(
        shown, args=args, code=2 if says else 0, says=says, holds=holds if settled else None
    )


def written(name: str, content: str | bytes, *args, says: str | None = None, **settled) -> Attack:
    """A row about a file; args has "FILE" where its path goes."""

    def prepare(folder: Path) -> list:
        file = folder / "mine"
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return [file if argument == "FILE" else argument for argument in args]

    return replace(flag(says=says, **settled), name=name, prepare=prepare)


PATHS = [
    "--model",
    "--dataset",
    "--validation_file",
    "--chat_template",
    "--cache_dir",
    "--ds_config",
    "--fsdp_config",
    "--nvme_path",
    "--output_dir",
    "--resume",
    "--export_hf",
    "--memory_snapshot",
    "--profile",
    "--config",
    "--deepspeed",
]
TEXTS = ["--dataset_config", "--text_column", "--lora_targets", "--generate"]


# -------------------------------------------------------------------------------------------- flags


@table(
    *[
        flag(path, "", says=f"{path}.*empty")
        for path in PATHS + TEXTS
        if path not in ("--lora_targets", "--generate")
    ],
    flag("--lora_targets", " ", says="--lora_targets"),
    flag("--generate", "", says="--generate"),
    *[flag(path, LONG, says=f"{path}.*longer than a file name") for path in PATHS],
    *[flag(path, "/" + 1100 * "abcd/", says=f"{path}.*longer than a file name") for path in PATHS],
    *[flag(path, "a\nb", says=f"{path}.*control characters") for path in PATHS],
    *[
        flag(path, "~nobody-at-all/x", says=f"{path}.*home folder of an unknown user")
        for path in PATHS
    ],
    flag("--output_dir", "a\udcffb", says="not UTF-8"),
    flag("--generate", "a\udcffb", says="not UTF-8"),
    flag("--output_dir", "läufe/ä b\u00a0c", output_dir="läufe/ä b\u00a0c"),
    *[
        flag(f"--{name}", value, says=f"--{name}.*{re.escape(value[:20])}")
        for name in (
            "seed",
            "batch_size",
            "seq_length",
            "gradient_accumulation_steps",
            "epochs",
            "max_steps",
            "warmup_steps",
            "num_samples",
            "eval_samples",
            "eval_every",
            "save_every",
            "keep_last",
            "logging_steps",
            "early_stopping_patience",
            "ddp_timeout",
            "simulate_gpus",
            "lora_r",
            "shuffle_buffer",
            "max_bad_rows",
            "lora_alpha",
            "lr",
            "weight_decay",
            "max_grad_norm",
        )
        for value in ("100000000000000000000000", DIGITS, "-1", "1e400")
    ],
    flag("--local_rank", DIGITS, says="--local_rank"),
    flag("--lr", "1e308", says="--lr"),
    flag("--dropout", DIGITS, says="--dropout"),
    flag("--seed", str(2**63 - 1), seed=2**63 - 1),
    flag("--batch_size", "٤", batch_size=4),  # digits of another script are digits
    flag(LONG, says="unknown argument"),
    flag("--strategy", LONG, says="--strategy"),
    flag("--report_to", LONG, says="no tracker"),
    flag("--unknown\nflag", says=r"unknown argument --unknown\\nflag"),
)
def test_flag(attack, tmp_path):
    attack.check(tmp_path, parsed(attack.args))


@table(
    flag("--learning_rate", "1e-3", lr=1e-3),
    flag("--num_epochs", "3", epochs=3),
    flag("--num_train_epochs", "3", epochs=3),
    flag("--data_size", "20", num_samples=20),
    flag("--mixed_precision", "no", precision="fp32"),
    flag("--mixed_precision", "bf16", precision="bf16"),
    flag("--max_length", "64", seq_length=64),
    flag("--model_name_or_path", "gpt2", model="gpt2"),
    flag("--per_device_train_batch_size", "2", batch_size=2),
    flag("--learning_rate", "x", says="--learning_rate"),
    flag("--learning_rate", "1e-3", "--lr", "1e-4", says="--learning_rate and --lr are two names"),
    flag("--num_epochs=2", "--num_train_epochs=3", says="two names"),
    flag("--lr", "1e-3", "--lr", "1e-4", lr=1e-4),  # one spelling: the last wins, as always
    flag(
        "--deepspeed", "ds_config_stage2.json", strategy="zero2", ds_config="ds_config_stage2.json"
    ),
    flag("--deepspeed=ds_config_stage3.json", strategy="zero3"),
    flag("--deepspeed", "--deepspeed_config", "ds_config_stage1.json", strategy="zero1"),
    flag("--deepspeed_config", "ds_config_offload.json", "--deepspeed", strategy="offload"),
    flag(
        "--deepspeed",
        "ds_config_infinity.json",
        "--batch_size",
        "2",
        strategy="infinity",
        batch_size=2,
    ),
    flag("--deepspeed", "--strategy", "zero3", strategy="zero3"),
    flag("--use_deepspeed", "--strategy", "zero1", strategy="zero1"),
    flag("--use_fsdp", strategy="fsdp"),
    flag("--deepspeed", says="--deepspeed needs"),
    flag("--deepspeed", "--strategy", "dp", says="--strategy dp"),
    flag("--deepspeed", "ds_config_stage2.json", "--strategy", "fsdp", says="--strategy fsdp"),
    flag("--deepspeed", "ds_config_stage2.json", "--strategy", "zero3", says="stage 2"),
    flag(
        "--deepspeed",
        "ds_config_stage2.json",
        "--ds_config",
        "ds_config_stage3.json",
        says="two names",
    ),
    flag("--use_fsdp", "--strategy", "zero2", says="--use_fsdp contradicts"),
    flag("--use_fsdp", "--deepspeed", says="cannot both"),
    flag("--hostfile", "x", says="flag of the launcher"),
    flag("--nproc_per_node=2", says="flag of the launcher"),
    flag("--nproc-per-node=2", says="flag of the launcher"),
    flag("--num_gpus", "2", says="flag of the launcher"),
    flag("--num_processes", "2", says="flag of the launcher"),
    flag("--master_port", "29501", says="flag of the launcher"),
    flag("--batch-size", "2", says="did you mean --batch_size"),
    flag("--learning_rat", "2", says="did you mean --learning_rate"),
    flag("--zzz", says=r"unknown argument --zzz \("),  # no guess
)
def test_spelling(attack, tmp_path, monkeypatch):
    monkeypatch.chdir(PROJECT)
    attack.check(tmp_path, parsed(attack.args))


# ---------------------------------------------------------------------------------------- run files


def run_file(name: str, content: str | bytes, says: str | None = None, **settled) -> Attack:
    return written(name, content, "--config", "FILE", says=says, **settled)


def bomb(first: str, line: str) -> str:
    """Nine lines, each of which has ten aliases of the one before."""
    return "\n".join(
        [
            f"a: &a {first}",
            *(line.format(new=b, old=", ".join([f"*{a}"] * 10)) for a, b in pairwise("abcdefghi")),
        ]
    )


@table(
    run_file("a number as key", "1: 2", "line 1.*key 1 is not text"),
    run_file("true as key", "true: 2", "key true is not text"),
    run_file("null as key", "batch_size: 2\n~: 2", "line 2"),
    run_file("a list as key", "? [a, b]\n: 2", "line 1"),
    run_file("a mapping as key", "? {a: b}\n: 2", "line 1"),
    run_file("nested lists", "model: " + DEEP * "[", "nested"),
    run_file("nested mappings", "model: " + DEEP * "{a: ", "nested"),
    run_file("nested by indentation", "\n".join(" " * i + "a:" for i in range(1000)), "nested"),
    run_file(
        "a key given twice",
        "batch_size: 2\nlr: 1\nbatch_size: 3",
        "line 3.*batch_size is given twice",
    ),
    run_file(
        "a key given twice in a section", "training:\n  lr: 1\n  lr: 2", "line 3.*lr is given twice"
    ),
    run_file("a key in and outside of a section", "lr: 1\ntraining:\n  lr: 2", "lr"),
    run_file("two names of one key", "lr: 1\nlearning_rate: 2", "lr"),
    run_file("digits", f"batch_size: {DIGITS}", "batch_size"),
    run_file("digits of a rate", f"lr: {DIGITS}", "lr"),
    run_file("a bomb of aliases", bomb("[x]", "{new}: &{new} [{old}]"), "aliases"),
    run_file("a bomb that merges", bomb("{x: 1}", "{new}: &{new} {{<<: [{old}]}}"), "<<|alias"),
    run_file("an alias of itself", "model: &a [*a]", "nested"),
    run_file(
        "a long text many times",
        f"a: &a {'x' * 100_000}\nmodel: [{','.join(['*a'] * 10_000)}]",
        "alias",
    ),
    run_file("an alias that is fine", "seed: &n 3\nbatch_size: *n", seed=3, batch_size=3),
    run_file("a tag of Python", "model: !!python/object/apply:os.system ['exit 7']", "tag"),
    run_file("a NUL in a path", 'output_dir: "a\\0b"', "control characters"),
    run_file("a line feed in a path", 'output_dir: "a\\nb"', "control characters"),
    run_file("a long path", f"output_dir: {LONG}", "longer than a file name"),
    run_file("an empty path", "dataset: ''", "dataset.*empty"),
    run_file("not UTF-8", "model: café".encode("latin-1"), "UTF-8"),
    run_file("UTF-16", "model: gpt2".encode("utf-16"), "UTF-8"),
    run_file("a mark of byte order", "\ufeffbatch_size: 2", batch_size=2),
    run_file("line ends of Windows", "batch_size: 2\r\nlr: 1e-4\r\n", batch_size=2, lr=1e-4),
    run_file("empty", "", "key: value"),
    run_file("a text", "hello", "key: value"),
    run_file("two documents", "lr: 1\n---\nlr: 2", "single document"),
    run_file("a control character", "lr: \x01", "not allowed|special"),
    run_file("a megabyte", "# " + "x" * (1 << 21), "longer than"),
    run_file("a tab", "training:\n\tlr: 1", "line 2"),
    run_file("an octal number", "seed: 010", seed=10),  # YAML 1.1 takes it for 8
    run_file("a number of base 60", "num_samples: 1:30", "1:30"),  # for 90
    run_file("a folder like a date", "output_dir: 2024-01-01", output_dir="2024-01-01"),
    run_file("a folder like a number", "output_dir: 1e3", output_dir="1e3"),
    run_file("no", "mixed_precision: no", precision="fp32"),
    run_file("no in quotes", "mixed_precision: 'no'", precision="fp32"),
    run_file("a list for a number", "batch_size: [1, 2]", "batch_size cannot be"),
    run_file("a switch with a number", "no_export: 1", "no_export cannot be"),
    run_file("deepspeed as a switch", "deepspeed: true\nstrategy: zero3", strategy="zero3"),
    run_file(
        "deepspeed as a file", f"deepspeed: {PROJECT}/ds_config_stage3.json", strategy="zero3"
    ),
    run_file(
        "a file and no switch",
        f"deepspeed_config: {PROJECT}/ds_config_stage3.json",
        strategy="zero3",
    ),
    run_file(
        "a file that is off",
        f"use_deepspeed: false\ndeepspeed_config: {PROJECT}/ds_config_stage3.json",
        strategy="dp",
    ),
    run_file("deepspeed and fsdp", "use_deepspeed: true\nuse_fsdp: true", "both"),
    run_file("a key far from all", "hostfile: x", r"unknown key hostfile \("),
    run_file("an alias as key", "&a model: gpt2\n*a : x", "model is given twice"),
    run_file("a set", "lora_targets: !!set {a, b}", "tag"),
    run_file("bytes", "model: !!binary aGVsbG8=", "tag"),
    run_file("an ordered mapping", "training: !!omap [lr: 1]", "tag"),
    run_file("another version of YAML", "%YAML 9.9\n---\nlr: 1", "incompatible"),
    run_file("infinity", "lr: .inf", "lr"),
    run_file("a line separator in a path", 'output_dir: "a\\u2028b"', "control characters"),
    run_file(
        "a list of trackers", "report_to: [tensorboard, wandb]", report_to=["tensorboard", "wandb"]
    ),
    run_file("a list in a list", "report_to: [[tensorboard]]", "no tracker"),
    run_file(
        "a section in a section", "training:\n  distributed:\n    lr: 1", "unknown key distributed"
    ),
    run_file("a text for a switch", 'eval: "no"', "eval cannot be"),
    run_file("another run file", "config: x.yaml", "unknown key config"),
    run_file("the version", "version: true", "unknown key version"),
    run_file("no_eval", "no_eval: true", eval=False),
    run_file("a value like a flag", "output_dir: --lr", output_dir="--lr"),
    run_file("resume as printed", "resume: ''\noutput_dir: x", resume=""),
    Attack("a folder", prepare=lambda folder: ["--config", folder], says="directory"),
    Attack("a device", args=("--config", "/dev/zero"), says="not an ordinary file"),
    Attack("a file that is missing", args=("--config", "no-such.yaml"), says="No such file"),
    Attack(
        "the command line wins over another name",
        prepare=lambda folder: (
            (folder / "r").write_text("learning_rate: 1")
            and ["--config", folder / "r", "--lr", "2"]
        ),
        code=0,
        holds=lambda _, run: settings(run)["lr"] == 2 or pytest.fail(),
    ),
)
def test_run_file(attack, tmp_path):
    attack.check(tmp_path, parsed([*attack.args, *(attack.prepare(tmp_path) or [])]))


# --------------------------------------------------------------------------------------- JSON files


def ds(name: str, content: str, says: str | None = None, **settled) -> Attack:
    return written(name, content, "--ds_config", "FILE", says=says, **settled)


def stage2(**change) -> str:
    config = json.loads((PROJECT / "ds_config_stage2.json").read_text())
    return json.dumps({**config, **change})


def on_nvme(path: str) -> str:
    return json.dumps(
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": path},
            }
        }
    )


def zero(**change) -> str:
    return stage2(zero_optimization={"stage": 2, **change})


@table(
    ds(
        "a key given twice",
        '{"zero_optimization": {"stage": 2}, "gradient_clipping": 1, "gradient_clipping": 2}',
        "gradient_clipping twice",
    ),
    ds(
        "a key given twice inside", '{"zero_optimization": {"stage": 2, "stage": 3}}', "stage twice"
    ),
    ds(
        "many keys, the last one twice",
        "{" + "".join(f'"{key}": 1, ' for key in range(60_000)) + '"59999": 2}',
        "59999 twice",
    ),
    ds(
        "a key given twice, with a comment",
        '{// mine\n"zero_optimization": {"stage": 2, "stage": 3}}',
        "stage twice",
    ),
    ds("enabled: yes", stage2(bf16={"enabled": "yes"}), "bf16.enabled must be true or false"),
    ds("enabled: 1", stage2(bf16={"enabled": 1}), "bf16.enabled"),
    ds("enabled in quotes", stage2(fp16={"enabled": "true"}), "fp16.enabled"),
    ds("auto_cast: on", stage2(fp16={"auto_cast": "on"}), "fp16.auto_cast"),
    ds("overlap_comm: yes", zero(overlap_comm="yes"), "zero_optimization.overlap_comm"),
    ds("a bucket in quotes", zero(reduce_bucket_size="5e8"), "reduce_bucket_size must be a number"),
    ds(
        "a stage in quotes",
        stage2(zero_optimization={"stage": "2"}),
        "zero_optimization.stage must be a number",
    ),
    ds(
        "a stage that is no whole number",
        stage2(zero_optimization={"stage": 2.0}),
        "stage must be a whole number",
    ),
    ds("a stage that there is not", stage2(zero_optimization={"stage": 4}), "must be 1, 2 or 3"),
    ds(
        "a device that there is not",
        zero(offload_optimizer={"device": "gpu"}),
        "device must be one of",
    ),
    ds("a number as device", zero(offload_param={"device": 3}), "device must be one of"),
    ds("a list as device", zero(offload_param={"device": []}), "device must be one of"),
    ds("a total batch of 10^26", stage2(train_batch_size=10**26), "train_batch_size"),
    ds(
        "a micro-batch that is a list",
        stage2(train_micro_batch_size_per_gpu=[2]),
        "train_micro_batch_size_per_gpu",
    ),
    ds(
        "a clipping that is no number",
        '{"zero_optimization": {"stage": 2}, "gradient_clipping": NaN}',
        "gradient_clipping",
    ),
    ds(
        "a rate that is true",
        stage2(optimizer={"type": "AdamW", "params": {"lr": True}}),
        "optimizer.params.lr",
    ),
    ds(
        "a stage that is true",
        stage2(zero_optimization={"stage": True}),
        "zero_optimization.stage must be a number",
    ),
    ds(
        "a section that is true",
        stage2(zero_optimization=True),
        "zero_optimization must be an object",
    ),
    ds(
        "an offload that is true",
        zero(offload_optimizer=True),
        "offload_optimizer must be an object",
    ),
    ds("a section that is null", stage2(optimizer=None), "optimizer must be an object"),
    ds(
        "pin_memory: yes",
        zero(offload_optimizer={"device": "cpu", "pin_memory": "yes"}),
        "pin_memory",
    ),
    ds(
        "torch_adam: 1",
        stage2(optimizer={"type": "AdamW", "params": {"torch_adam": 1}}),
        "torch_adam",
    ),
    ds(
        "digits", f'{{"zero_optimization": {{"stage": 2}}, "train_batch_size": {DIGITS}}}', "digits"
    ),
    ds(
        "digits, with a comment",
        f'{{// x\n"train_batch_size": {DIGITS}, "zero_optimization": {{"stage": 2}}}}',
        "digits",
    ),
    ds("nested", '{"a":' * DEEP, "nested"),
    ds("nested lists", "[" * DEEP, "nested"),
    ds("nested, with a comment", "/* x */" + '{"a":' * DEEP, "nested"),
    ds("nested, but parsed", '{"a":' * 60 + "1" + "}" * 60, "nested"),
    ds("a list", "[1]", "object"),
    ds("empty", "", "stage"),
    ds(
        "a large micro-batch",
        stage2(train_micro_batch_size_per_gpu=10**12),
        "train_micro_batch_size_per_gpu",
    ),
    ds(
        "a micro-batch that is true",
        stage2(train_micro_batch_size_per_gpu=True),
        "train_micro_batch_size_per_gpu",
    ),
    ds("a NUL in nvme_path", on_nvme("a\0b"), "nvme_path.*control"),
    ds("a long nvme_path", on_nvme(LONG), "nvme_path"),
    ds("a rate in quotes", stage2(optimizer={"type": "AdamW", "params": {"lr": "7e-5"}}), lr=7e-5),
    ds("a mark of byte order", "\ufeff" + stage2(), strategy="zero2"),
    ds(
        "everything auto",
        stage2(train_batch_size="auto", zero_optimization={"stage": 2, "reduce_scatter": True}),
        strategy="zero2",
    ),
    ds(
        "betas and eps auto",
        stage2(
            optimizer={"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}}
        ),
        strategy="zero2",
    ),
)
def test_deepspeed_file(attack, tmp_path):
    attack.check(tmp_path, parsed(attack.prepare(tmp_path)))


def test_auto_in_deepspeeds_file_leaves_the_run_file_to_decide(tmp_path):
    (tmp_path / "ds.json").write_text(stage2())
    (tmp_path / "run.yaml").write_text(
        f"batch_size: 2\ngradient_accumulation_steps: 3\ndeepspeed: {tmp_path}/ds.json\n"
    )
    args = parse_arguments(["--config", str(tmp_path / "run.yaml")])
    assert (
        args.ds_config_dict["train_micro_batch_size_per_gpu"] == 2
        and args.ds_config_dict["train_batch_size"] == 6
    )
    (tmp_path / "ds.json").write_text(stage2(train_micro_batch_size_per_gpu=4))
    with pytest.raises(
        UserError, match=r"--batch_size 2 contradicts train_micro_batch_size_per_gpu 4"
    ):
        parse_arguments(["--config", str(tmp_path / "run.yaml")])


@table(
    written(
        "a key given twice",
        '{"fsdp_offload_params": true, "fsdp_offload_params": false}',
        *(fsdp := ("--strategy", "fsdp", "--fsdp_config", "FILE")),
        says="twice",
    ),
    written("a text for a switch", '{"fsdp_offload_params": "yes"}', *fsdp, says="true or false"),
    written("nested", '{"a":' * DEEP, *fsdp, says="nested"),
    written("digits", f'{{"fsdp_version": {DIGITS}}}', *fsdp, says="digits"),
    written(
        "a list as a value",
        '{"fsdp_sharding_strategy": ["FULL_SHARD"]}',
        *fsdp,
        says="fsdp_sharding_strategy",
    ),
    written(
        "an object as a value", '{"fsdp_auto_wrap_policy": {}}', *fsdp, says="fsdp_auto_wrap_policy"
    ),
    written(
        "true as a number", '{"fsdp_sharding_strategy": true}', *fsdp, says="fsdp_sharding_strategy"
    ),
    written("not UTF-8", b'{"\xff": 1}', *fsdp, says="UTF-8"),
)
def test_fsdp_file(attack, tmp_path):
    attack.check(tmp_path, parsed(attack.prepare(tmp_path)))


# ------------------------------------------------------------------------------ other command lines


@pytest.fixture
def main_of(capsys, monkeypatch):
    """main_of(module, *argv): run a script's main() in this process, as a `Run`."""
    monkeypatch.syspath_prepend(str(PROJECT / "scripts"))

    def run(module: str, *argv) -> Run:
        import importlib

        monkeypatch.setattr(sys, "argv", [module, *map(str, argv)])
        started = time.monotonic()
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(module).main()
        out, err = capsys.readouterr()
        assert time.monotonic() - started < SPARE_SECONDS
        return Run(ended.value.code, out, err, 0, Path())

    return run


GPT2_FILE = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 100,
    "n_positions": 64,
}


@table(
    written("nested", '{"a":' * DEEP, says="nested"),
    written("digits", f'{{"n_embd": {DIGITS}}}', says="digits"),
    written("a list", "[]", says="object"),
    written("a list as model_type", '{"model_type": ["gpt2"]}', says="does not support model_type"),
    written(
        "a thousand million layers", json.dumps({**GPT2_FILE, "n_layer": 10**9}), says="n_layer"
    ),
    written("true as a size", json.dumps({**GPT2_FILE, "n_embd": True}), says="n_embd"),
    written(
        "a text as a size", json.dumps({**GPT2_FILE, "n_positions": "many"}), says="n_positions"
    ),
    written(
        "more heads than width", json.dumps({**GPT2_FILE, "n_head": 65}), says="attention heads"
    ),
)
def test_config_json_of_the_planner(attack, tmp_path, main_of):
    attack.prepare(tmp_path)
    attack.check(
        tmp_path, main_of("plan_memory", "--model", tmp_path / "mine", "--gpu_memory", "16")
    )


@table(
    flag("--gpu_memory", "1e308", says="--gpu_memory"),
    flag("--gpu_memory", "nan", says="--gpu_memory"),
    flag("--gpu_memory", "16", "--gpus", "1000000000000", says="--gpus"),
    flag("--gpu_memory", "16", "--batch_size", "1000000000000", says="--batch_size"),
    flag("--gpu_memory", "16", "--lora_r", DIGITS, says="--lora_r"),
    flag("--gpu_memory", "16", "--model", LONG, says="--model"),
    flag("--gpu_memory", "16", "--model", "", says="--model"),
    flag("--gpu_memori", "16", "--gpu_memory", "16", says="did you mean --gpu_memory"),
    flag("--num_gpus", "4", "--gpu_memory", "16", says="did you mean --gpus"),
)
def test_flag_of_the_planner(attack, tmp_path, main_of):
    attack.check(tmp_path, main_of("plan_memory", *attack.args))


@table(
    flag("x", says="--inspect"),
    flag("x", "--to", "hf", says="OUT"),
    flag("x", "--to", "safetensors", "y", says="--to"),
    flag("", "--inspect", says="CKPT"),
    flag("a\nb", "--inspect", says="CKPT"),
    flag("x", "--inspec", says="--inspec"),
)
def test_flag_of_the_converter(attack, tmp_path, main_of):
    run = main_of("convert_checkpoint", *attack.args)
    attack.check(tmp_path, run)
    assert run.err.count("\n") == 1, run.err


def test_the_largest_numbers_are_planned_at_once(main_of):
    largest = [
        "--gpus",
        2**17,
        "--gpus_per_node",
        "8",
        "--batch_size",
        2**20,
        "--gradient_accumulation_steps",
        2**20,
    ]
    for solve in ([], ["--solve", "batch"], ["--solve", "gpus"], ["--solve", "model"]):
        assert main_of("plan_memory", "--gpu_memory", "16", *largest, *solve).code in (0, 1)


# ------------------------------------------------------------------------- before torch is imported


def model_folder(name: str, content: str | dict, says: str, file: str = "config.json") -> Attack:
    def prepare(folder: Path) -> list:
        (folder / "config.json").write_text(json.dumps(GPT2_FILE))
        (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
        return ["--model", folder, "--dataset", "pydocs"]

    return Attack(name, prepare=prepare, says=says)


def cached(*files: str) -> dict:
    """How another program may have left a model in the hub's cache."""

    def prepare(folder: Path) -> list:
        snapshot = folder / "hf" / "hub" / "models--some--model" / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (snapshot.parent.parent / "refs").mkdir()
        (snapshot.parent.parent / "refs" / "main").write_text("abc")
        for file in files:
            (snapshot / file).write_text("{}")
        (snapshot / "model-00002.safetensors").symlink_to("../../blobs/gone")
        return ["--model", "some/model", "--dataset", "pydocs"]

    return {"prepare": prepare, "env": {"HF_HUB_OFFLINE": "1", "HF_HOME": "hf"}}


def with_tensorboard(path: str) -> list[str]:
    return ["--report_to", "tensorboard"] if path == "--logging_dir" else []


@table(
    model_folder("config.json nested", '{"a":' * DEEP, "nested"),
    model_folder("config.json with digits", f'{{"n_embd": {DIGITS}}}', "digits"),
    model_folder("config.json a list", "[]", "object"),
    model_folder("config.json not JSON", "{", "line 1"),
    model_folder("config.json not finite", json.dumps({**GPT2_FILE, "n_embd": 1e999}), "n_embd"),
    model_folder("a thousand million layers", {**GPT2_FILE, "n_layer": 10**9}, "n_layer"),
    model_folder(
        "layers inside",
        {"model_type": "llama", "text_config": {"num_hidden_layers": 10**9}},
        "num_hidden_layers",
    ),
    model_folder("a text as vocabulary", {**GPT2_FILE, "vocab_size": "many"}, "vocab_size"),
    model_folder("negative positions", {**GPT2_FILE, "n_positions": -1}, "n_positions"),
    Attack(
        "config.json a folder",
        says="cannot be read|no config.json",
        prepare=lambda folder: (folder / "config.json").mkdir() or ["--model", folder],
    ),
    Attack(
        "weights without a tokenizer in the cache",
        says="no tokenizer files of some/model.*--prefetch --model some/model",
        **cached("config.json", "model.safetensors"),
    ),
    Attack(
        "only a tokenizer's configuration",
        says="no tokenizer files",
        **cached("config.json", "tokenizer_config.json", "model.safetensors"),
    ),
    Attack(
        "a tokenizer without weights in the cache",
        says="no weights of some/model.*--prefetch",
        **cached("config.json", "tokenizer.json"),
    ),
    Attack(
        "neither",
        says="no config.json and no tokenizer files and no weights",
        **cached("README.md"),
    ),
    Attack(
        "nothing in the cache",
        args=("--model", "gpt2", "--dataset", "wikitext"),
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": "hf"},
        says="--prefetch --model gpt2 --dataset wikitext",
    ),
    Attack(
        "a rank that is no number",
        env={"RANK": "x", "WORLD_SIZE": "2"},
        says="environment is incomplete",
    ),
    Attack(
        "a world of many digits",
        env={"RANK": "0", "WORLD_SIZE": DIGITS},
        says="environment is incomplete",
    ),
    Attack(
        "Slurm's rank no number",
        says="environment is incomplete",
        env={"SLURM_PROCID": "x", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"},
    ),
    Attack(
        "an endpoint that is a file",
        args=("--model", "gpt2"),
        env={"HF_ENDPOINT": "file:///etc/passwd", "HF_HOME": "hf"},
        says="cannot be reached",
    ),
    Attack(
        "an endpoint that is no address",
        args=("--model", "gpt2"),
        env={"HF_ENDPOINT": "http://[::1", "HF_HOME": "hf"},
        says="cannot be reached",
    ),
    Attack(
        "HF_HOME is a file",
        args=("--model", "gpt2"),
        env={"HF_HOME": "file", "HF_HUB_OFFLINE": "1"},
        says="not in the cache",
        prepare=lambda folder: (folder / "file").write_text("") and None,
    ),
    Attack(
        "Python's own encoding is ASCII",
        args=("--strategy", "ä"),
        env={"PYTHONIOENCODING": "ascii"},
    ),
    Attack(
        "a locale without UTF-8",
        args=("--model", "ä€"),
        env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ),
    *[
        Attack(
            f"{path} under a file",
            prepare=lambda folder, path=path: (
                (folder / "file").write_text("")
                or [path, folder / "file" / "x", *with_tensorboard(path)]
            ),
            says="is a file",
        )
        for path in ("--output_dir", "--export_hf", "--logging_dir")
    ],
    *[
        Attack(
            f"{path} a link to itself",
            prepare=lambda folder, path=path: (
                (folder / "l").symlink_to("l")
                or [path, folder / "l" / "x", *with_tensorboard(path)]
            ),
            says="a link to nothing, or to itself",
        )
        for path in ("--output_dir", "--export_hf", "--logging_dir")
    ],
    Attack(
        "a template that never ends",
        args=("--chat_template", "/dev/zero"),
        says="not an ordinary file",
    ),
    Attack(
        "a template that is a pipe",
        says="not an ordinary file",
        prepare=lambda folder: os.mkfifo(folder / "p") or ["--chat_template", folder / "p"],
    ),
    Attack(
        "a run file that is a pipe",
        says="not an ordinary file",
        prepare=lambda folder: os.mkfifo(folder / "p") or ["--config", folder / "p"],
    ),
    Attack(
        "a pipe as earlier results",
        says="holds another run",
        prepare=lambda folder: os.mkfifo(folder / "results.json") or ["--output_dir", folder],
    ),
    Attack(
        "nested earlier results",
        says="holds another run",
        prepare=lambda folder: (
            (folder / "results.json").write_text('{"a":' * DEEP) and ["--output_dir", folder]
        ),
    ),
    Attack(
        "--prefetch on two ranks",
        args=("--prefetch",),
        env={"RANK": "0", "WORLD_SIZE": "2"},
        says="one process",
    ),
    Attack("--prefetch and --check", args=("--prefetch", "--check"), says="cannot both"),
    Attack(
        "--logging_dir without TensorBoard",
        args=("--logging_dir", "x"),
        says="--report_to tensorboard",
    ),
    Attack(
        "--logging_dir of another run",
        args=("--report_to", "tensorboard"),
        says="curves of another run",
        prepare=lambda folder: (
            (folder / "events.out.tfevents.1.x").write_text("") or ["--logging_dir", folder]
        ),
    ),
)
def test_refused_before_torch_is_imported(attack, script, tmp_path):
    args = [*attack.args, *(attack.prepare(tmp_path) or [])]
    env = {
        name: tmp_path / value if name == "HF_HOME" else value for name, value in attack.env.items()
    }
    run = script(*args, env=env, ok=False, timeout=60, real=True)
    attack.check(tmp_path, run)
    assert "import torch" not in run.err and run.seconds < 5


def test_after_prefetch_the_run_needs_no_hub(script, hub, tmp_path):
    """On a head node, with the flags of the job: what the job needs of its own machine is not asked
    for.
    """
    work = [
        "--model",
        "gpt2",
        "--num_samples",
        "4",
        "--seq_length",
        "32",
        "--max_steps",
        "1",
        "--no_eval",
        "--no_export",
        "--precision",
        "fp32",
    ]
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": tmp_path / "hf"}
    folder = tmp_path / "out"
    first = script(
        *work,
        "--prefetch",
        "--strategy",
        "infinity",
        "--nvme_path",
        "/no/such/disk",
        env=env,
        folder=folder,
    )
    assert "Prefetched" in first.out and not folder.exists()
    cached = sorted((tmp_path / "hf" / "distributed_training").iterdir())
    hub.close()
    run = script(*work, env={**env, "HF_HUB_OFFLINE": "1"}, folder=folder)
    assert run.results["status"] == "completed" and len(run.losses) == 1
    assert sorted((tmp_path / "hf" / "distributed_training").iterdir()) == cached, (
        "it was tokenised a second time"
    )


# ------------------------------------------------------------------------------------- results.json


RANK = {
    "parameters": 8,
    "gradients": 8,
    "optimizer": 16,
    "buffers": 0,
    "other": 1,
    "activations": None,
    "logits": None,
}
RESULTS = {
    "status": "completed",
    "strategy": "dp",
    "model": "tiny-gpt2",
    "parameters": 2,
    "trainable_parameters": 2,
    "world_size": 2,
    "simulated_world_size": None,
    "device": "cpu",
    "precision": "fp32",
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "global_batch_size": 2,
    "seq_length": 8,
    "seed": 1,
    "steps": 2,
    "samples": 4,
    "dataset": {"name": "d", "sha256": "x"},
    "hardware": {"cpu": "c", "cores": 1, "gpu": None, "gpu_memory_bytes": None, "ram_bytes": 9},
    "command": "python x",
    "versions": {"torch": "2", "deepspeed": "1", "transformers": "5"},
    "started_at": "2026-01-01T00:00:00+00:00",
    "memory": {
        "peak_bytes": [9, 9],
        "host_peak_bytes": [9, 9],
        "nvme_bytes": 0,
        "categories_bytes_by_rank": [RANK, RANK],
        "device_categories_bytes_by_rank": [RANK, RANK],
        "placement": {"optimizer": "device"},
        "predicted_bytes": {"parameters": 8, "gradients": 8, "optimizer": 16, "peak": 40},
        "step_bytes_by_rank": [None],
    },
    "samples_per_second": 2.0,
    "tokens_per_second_per_gpu": 16.0,
    "warmup_steps_excluded": 0,
    "train_loss_first": 3.0,
    "train_loss_last": 2.0,
    "step_phases_seconds": {"data": 0.1, "forward": 0.1, "backward": 0.1, "update": 0.1},
    "communication_bytes_per_step": 8.0,
    "communication_per_step": {
        "all_reduce float32": {"calls": 1, "message_bytes": 8, "sent_bytes": 8}
    },
}
STEP = {"loss": 3.0, "lr": 0.1, "tokens_per_second": 16.0}
WRONG = [None, "x", "²", -1, True, [], {}, [None], {"x": 1}, [[[]]], 10**400, float("nan")]


def save_run(folder: Path, results, metrics=(STEP, STEP)) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(
        results if isinstance(results, str) else json.dumps(results)
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in metrics))


def damaged(value, wrong):
    """Every version of `value` in which one part is `wrong`, or is missing."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield {name: other for name, other in value.items() if name != key}
            for part in damaged(inner, wrong):
                yield value | {key: part}
    elif isinstance(value, list) and value:
        for part in damaged(value[0], wrong):
            yield [part, *value[1:]]
    yield wrong


@pytest.fixture
def report(tmp_path):
    """report() reads the runs in tmp_path and makes all texts of the report; returns the
    comparison.
    """
    from support.report import compare, tables

    def make():
        comparison = compare.read_comparison(tmp_path)
        for text in (tables.as_file, tables.as_json, tables.as_markdown):
            text(comparison)
        return comparison

    return make


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"world_size": 1},
        {"communication_bytes_per_step": None, "communication_per_step": None},
        {"device": "cuda", "hardware": RESULTS["hardware"] | {"gpu": "G", "gpu_memory_bytes": 99}},
        {"memory": RESULTS["memory"] | {"predicted_bytes": None}},
        {"precision": "bf16"},
        {"train_loss_last": 0},
    ],
)
def test_results_that_are_right_are_compared(tmp_path, report, change):
    save_run(tmp_path / "dp" / "1", RESULTS | change)
    save_run(tmp_path / "zero2" / "1", RESULTS | change | {"strategy": "zero2"})
    assert report().same_model


def test_a_simulation_is_reported(tmp_path, report):
    gone = (
        "samples_per_second",
        "tokens_per_second_per_gpu",
        "step_phases_seconds",
        "train_loss_last",
        "train_loss_first",
    )
    results = {key: None if key in gone else value for key, value in RESULTS.items()} | {
        "simulated_world_size": 4
    }
    save_run(tmp_path / "dp" / "1", results, [])
    comparison = report()
    assert comparison.reference is not None and comparison.simulated


@pytest.mark.attack
@pytest.mark.parametrize(
    "strategy, wrong",
    [*[("zero2", wrong) for wrong in WRONG], ("dp", None), ("dp", [])],
    ids=lambda value: repr(value)[:9],
)
def test_any_damage_to_results_ends_in_a_report(tmp_path, report, wrong, strategy):
    save_run(tmp_path / "dp" / "1", RESULTS)
    save_run(tmp_path / "zero2" / "1", RESULTS | {"strategy": "zero2"})
    for results in damaged(RESULTS, wrong):
        save_run(tmp_path / strategy / "1", results)
        report()
    for metrics in damaged([STEP, STEP], wrong):
        save_run(
            tmp_path / strategy / "1", RESULTS, metrics if isinstance(metrics, list) else [metrics]
        )
        report()


@table(
    Attack("nested", prepare=lambda folder: save_run(folder / "dp" / "1", '{"a":' * DEEP), code=3),
    Attack(
        "digits",
        prepare=lambda folder: save_run(folder / "dp" / "1", f'{{"steps": {DIGITS}}}'),
        code=3,
    ),
    Attack(
        "a pipe",
        prepare=lambda folder: (
            (folder / "dp" / "1").mkdir(parents=True)
            or os.mkfifo(folder / "dp" / "1" / "results.json")
        ),
        code=3,
    ),
    Attack("a list", prepare=lambda folder: save_run(folder / "dp" / "1", "[]"), code=3),
    Attack("a number", prepare=lambda folder: save_run(folder / "dp" / "1", "7"), code=3),
    Attack(
        "a number as status",
        prepare=lambda folder: save_run(folder / "dp" / "1", {"status": 7, "reason": 8}),
        code=3,
    ),
    Attack(
        "no samples_per_second",
        prepare=lambda folder: save_run(folder / "dp" / "1", RESULTS | {"samples_per_second": "x"}),
        code=3,
    ),
)
def test_status_of_a_damaged_run(attack, tmp_path, main_of):
    attack.prepare(tmp_path)
    attack.check(tmp_path, main_of("compare_report", tmp_path / "dp" / "1", "--status"))


@table(
    flag("", says="empty"),
    flag(LONG, says="longer than a file name"),
    flag("no-such", says="no such folder"),
    flag(".", "--tolerance", "nan", says="--tolerance"),
    flag(".", "--output_dir", LONG, says="--output_dir"),
    flag(".", "--statu", says="statu"),
)
def test_flag_of_the_report(attack, tmp_path, main_of):
    attack.check(tmp_path, main_of("compare_report", *attack.args))
