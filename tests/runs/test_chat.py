"""scripts/chat.py answers as transformers does, remembers, and ends as a terminal program should."""

import io
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import PROJECT, SMALL

from distributed_training.console import visible

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
GREEDY = ["--temperature", "0", "--device", "cpu"]


@pytest.fixture(scope="module")
def chat_model(llama, tmp_path_factory):
    """A folder with a model and a chat template."""
    folder = shutil.copytree(llama, tmp_path_factory.mktemp("chat") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def talk(main_of, monkeypatch):
    """talk(lines, *argv) runs chat.py with the lines as its input; returns it as a `Run`."""

    def run(lines, *argv):
        content = "".join(f"{line}\n" for line in lines).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))
        return main_of("chat", *argv)

    return run


def greedy(folder, ids, most):
    """The tokens with which transformers continues the ids, and the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from distributed_training.ranks.context import DTYPES
    from distributed_training.ranks.tuning import choose_precision

    dtype = DTYPES[choose_precision("auto", torch.device("cpu"))]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    options = {"do_sample": False, "max_new_tokens": most, "pad_token_id": 0}
    tokens = model.generate(torch.tensor([ids]), **options)[0, len(ids) :]
    return tokens, AutoTokenizer.from_pretrained(folder)


def test_answers_are_those_of_transformers_with_the_history(talk, chat_model):
    from transformers import AutoTokenizer

    questions = ["the fox?", "the dog?", "/new", "the dog?"]
    run = talk(questions, chat_model, *GREEDY, "--max_new_tokens", "9", "--system", "be quick")
    assert run.code == 0
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    expected, system = [], [{"role": "system", "content": "be quick"}]
    messages = list(system)
    for question in questions:
        if question == "/new":
            messages = list(system)
            continue
        messages.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens, _ = greedy(chat_model, tokenizer(text)["input_ids"], 9)
        answer = tokenizer.decode(tokens, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer.strip()})
        expected.append(answer)
    assert run.out == visible("".join(f"{answer}\n" for answer in expected))
    assert expected[1] != expected[2]  # the history matters


def test_the_seed_decides_what_is_drawn(talk, chat_model):
    flags = [chat_model, "--temperature", "2", "--device", "cpu", "--max_new_tokens", "20"]
    first, again, other = (
        talk(["the fox?"], *flags, "--seed", seed).out for seed in ("1", "1", "2")
    )
    assert first == again != other


def test_a_run_that_trained_on_text_continues_text(script, talk, small_gpt2, tmp_path):
    """Although its tokenizer has a chat template; each line without the ones before it."""
    model = shutil.copytree(small_gpt2, tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    flags = "--precision fp32 --max_steps 1 --no_eval --seq_length 32".split()
    run = script(*SMALL, "--model", model, *flags)
    said = talk(["The fox", "", "The fox"], run.folder, *GREEDY, "--max_new_tokens", "6")
    first, second = said.out.split("The fox")[1:]
    assert first == second and first.strip()
    tokens, tokenizer = greedy(run.folder / "hf", [0], 1)
    tokens, _ = greedy(run.folder / "hf", tokenizer("The fox")["input_ids"], 6)
    assert said.out.startswith("The fox" + tokenizer.decode(tokens, skip_special_tokens=True))
    assert "--system" in talk([], run.folder, "--system", "be quick").error


def test_adapters_are_used(script, talk, chat_model, text_file):
    """The base model is the one that their configuration names."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from distributed_training.trained.source import find_source
    from tools.chat.speaker import Speaker

    flags = "--seq_length 64 --max_steps 4 --precision fp32 --no_eval --lora_r 4 --lr 1e-1".split()
    run = script("--model", chat_model, "--dataset", text_file, *flags)
    speaker = Speaker.load(find_source(str(run.folder)))
    ids = torch.arange(32)[None]
    base = AutoModelForCausalLM.from_pretrained(chat_model, dtype=speaker.model.dtype)
    with torch.no_grad():
        without = base(ids).logits
        expected = PeftModel.from_pretrained(base, run.folder / "hf").eval()(ids).logits
        found = speaker.model(ids).logits
    assert torch.equal(found, expected) and (found - without).abs().max() > 0.1
    assert not speaker.is_chat
    assert talk(["the fox"], run.folder / "hf", *GREEDY).out.startswith("the fox")


DAMAGES = {
    "weights": (lambda f: os.truncate(f / "model.safetensors", 1000), "damaged"),
    "tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
    "config": (lambda f: (f / "config.json").write_text("{}"), "config.json"),
    "template": (lambda f: (f / "chat_template.jinja").write_text("{% x"), "template"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_incomplete_export_is_one_line(talk, chat_model, tmp_path, damage):
    folder = shutil.copytree(chat_model, tmp_path / "model")
    change, says = DAMAGES[damage]
    change(folder)
    run = talk(["the fox?"], folder, *GREEDY)
    assert run.code == 2 and says in run.error and run.error.count("--model") == 0


def test_a_conversation_forgets_its_oldest_turns(talk, chat_model):
    """The model has 128 positions."""
    flags = [chat_model, *GREEDY, "--max_new_tokens", "8"]
    run = talk([f"the quick brown fox {n}?" for n in range(6)], *flags)
    assert run.code == 0 and "oldest turn is left out" in run.err
    run = talk(["fox " * 100], *flags)
    assert run.code == 2 and "shorten it" in run.error


def test_a_system_message_without_a_place_is_refused(talk, chat_model, tmp_path):
    folder = shutil.copytree(chat_model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("messages %}", "messages[-1:] %}"))
    run = talk(["the fox?"], folder, "--system", "be quick")
    assert run.code == 2 and "--system" in run.error


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, command):
        self.master, terminal = pty.openpty()
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        self.process = subprocess.Popen(
            list(map(str, command)), **streams, cwd=PROJECT, start_new_session=True
        )
        os.close(terminal)
        self.printed = ""

    def wait_for(self, text):
        """Read until the terminal shows a text that it has not shown before."""
        self._read_until(lambda: text in self.printed)
        self.printed = self.printed.partition(text)[2]

    def wait_for_answer(self):
        """Read until the terminal shows more than the end of the line that was typed."""
        self._read_until(lambda: self.printed.strip())

    def _read_until(self, is_there, seconds=60):
        until = time.monotonic() + seconds
        while not is_there():
            ready, _, _ = select.select([self.master], [], [], max(0, until - time.monotonic()))
            assert ready, f"not all that is expected in {self.printed!r}"
            self.printed += os.read(self.master, 4096).decode(errors="replace")

    def type(self, text):
        os.write(self.master, text.encode())

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(preloaded, chat_model, tmp_path):
    """chat.py on a terminal; its model would talk for a million tokens."""
    folder = shutil.copytree(chat_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10**6}))
    (folder / "generation_config.json").write_text('{"suppress_tokens": [0]}')  # the end of a text
    command = [sys.executable, PROJECT / "scripts" / "chat.py", folder, "--temperature", "2"]
    command += ["--max_new_tokens", "900000"]
    started = Terminal(preloaded.replace(command) if preloaded else command)
    yield started
    started.close()


def test_ctrl_c_stops_the_answer_and_ctrl_d_the_program(terminal):
    terminal.wait_for("Ctrl-D ends.")
    for question in ("the fox?", "the dog?"):
        terminal.wait_for("> ")
        terminal.type(f"{question}\n")
        terminal.wait_for(question)  # the terminal shows what is typed
        terminal.wait_for_answer()
        time.sleep(0.2)
        assert terminal.process.poll() is None
        os.kill(terminal.process.pid, signal.SIGINT)
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(30) == 0


@pytest.mark.slow
def test_ctrl_c_without_an_answer_ends_the_program(terminal):
    terminal.wait_for("> ")
    time.sleep(1)  # a signal between the prompt and the read would wait for the next key
    os.kill(terminal.process.pid, signal.SIGINT)
    assert terminal.process.wait(30) == 130
