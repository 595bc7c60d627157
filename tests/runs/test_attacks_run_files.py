"""Attacks on run files."""

from itertools import pairwise

import pytest
from attacks import Attack, table
from command_lines import DEEP, DIGITS, LONG, parsed, settings, written
from conftest import PROJECT


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
    run_file("two names of one key", "lr: 1\nlearning_rate: 2", "lr and learning_rate"),
    run_file("bf16 and precision", "bf16: true\nprecision: fp32", "bf16 and precision"),
    run_file("bf16, not fp16", "fp16: false\nbf16: true", precision="bf16"),
    run_file("a switch that is off", "torch_compile: false", compile=False),
    run_file("no saves", "save_strategy: no\neval_strategy: no", eval=False, save_every=None),
    run_file("epochs like 3.0", "num_train_epochs: 3.0", epochs=3),
    run_file("fsdp as a list", "fsdp: [full_shard, auto_wrap]", strategy="fsdp"),
    run_file("fsdp that is off", "fsdp: ''\nfsdp_config: no-such.json", strategy="dp"),
    run_file("refused", "neftune_noise_alpha: 5", "--neftune_noise_alpha"),
    run_file(
        "refused, with the value that is accepted",
        "gradient_checkpointing_kwargs: {use_reentrant: false}",
        batch_size=4,
    ),
    run_file(
        "refused, with another value",
        "gradient_checkpointing_kwargs: {use_reentrant: true}",
        "without reentrant",
    ),
    run_file("ignored", "preprocessing_num_workers: 16\nlearning_rate: 1e-3", lr=1e-3),
    run_file("a name misspelled", "num_train_epoch: 1", "did you mean num_train_epochs"),
    run_file("resume off", "resume_from_checkpoint: false", resume=None),
    run_file("done", "do_eval: true\ndo_train: true", eval_only=False),
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
        "the command line's strategy wins over fsdp",
        prepare=lambda folder: (
            (folder / "r").write_text("fsdp: full_shard auto_wrap")
            and ["--config", folder / "r", "--strategy=zero2"]
        ),
        code=0,
        holds=lambda _, run: settings(run)["strategy"] == "zero2" or pytest.fail(),
    ),
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
