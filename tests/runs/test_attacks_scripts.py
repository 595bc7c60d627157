"""Attacks on the command lines of the scripts in scripts/."""

import json

from attacks import table
from command_lines import GPT2_FILE, flag, written


@table(
    written("a list", "[]", says="object"),
    written("a text as a size", json.dumps({**GPT2_FILE, "n_layer": "many"}), says="n_layer"),
)
def test_config_json_of_the_planner(attack, tmp_path, main_of):
    attack.prepare(tmp_path)
    attack.check(
        tmp_path, main_of("plan_memory", "--model", tmp_path / "mine", "--gpu_memory", "16")
    )


@table(
    flag("--gpu_memory", "nan", says="--gpu_memory"),
    flag("--gpu_memori", "16", "--gpu_memory", "16", says="did you mean --gpu_memory"),
    *(
        flag("--gpu_memory", "16", *words.split(), says=says)
        for words, says in (
            ("--tokens 5", "one rate.*--measure"),
            ("--price 2", "one amount of work.*--max_steps"),
            ("--tokens 5 --max_steps 5 --measure", "one amount of work"),
            ("--tokens 5 --measure --mfu 0.3", "--mfu needs --device"),
            ("--tokens 5 --device A100 --solve batch", "--solve"),
            ("--tokens 5 --device Z80", "Z80.*H100.*A100"),
            ("--tokens 5 --device A100 --mfu 1.5", "--mfu"),
            ("--tokens 5 --device A100 --price 0", "--price"),
        )
    ),
)
def test_flag_of_the_planner(attack, tmp_path, main_of):
    attack.check(tmp_path, main_of("plan_memory", *attack.args))


@table(
    flag("x", says="--inspect"),
    flag("x", "--to", "hf", says="OUT"),
    flag("", "--inspect", says="CKPT"),
)
def test_flag_of_the_converter(attack, tmp_path, main_of):
    run = main_of("convert_checkpoint", *attack.args)
    attack.check(tmp_path, run)
    assert run.err.count("\n") == 1, run.err


@table(
    flag("no-such", says="no such folder"),
    flag(".", "--tolerance", "nan", says="--tolerance"),
    flag(".", "--statu", says="statu"),
)
def test_flag_of_the_report(attack, tmp_path, main_of):
    attack.check(tmp_path, main_of("compare_runs", *attack.args))
