#!/usr/bin/env bash
# release: trl 1.16.0, transformers 5.23.0, torch 2.13.0
# finding: SFTTrainer removes rows of prompt and completion in which the prompt alone fills max_length: two rows become one. It says so only in the name of a progress bar, which is shown whether or not rows are removed. If there is no other row, it fails with "num_samples should be a positive integer".
# guess: Such a row is cut, has no labels, and is trained without effect.
# matters: Long prompts, as in summaries, leave the data set; the number of steps and the mixture of sources are not those of the file.
# instead: Compare len(trainer.train_dataset) with the rows given, or raise max_length.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --no-compile trl==1.16.0 transformers==5.23.0 \
    accelerate==1.15.0 datasets==5.2.0 pyarrow==25.0.1 torch==2.13.0
cd "$work"
HF_HOME=$work/home "$work/env/bin/python" - <<'PROGRAM' 2> errors || { cat errors; exit 1; }
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = Tokenizer(models.WordLevel(
    {"<eos>": 0, "<unk>": 1, "<pad>": 2, "a": 3, "b": 4}, unk_token="<unk>"
))
WORDS.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
CONFIG = LlamaConfig(
    vocab_size=5, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2,
)
SHORT = {"prompt": "a a a ", "completion": "b b"}
CUT = {"prompt": "a " * 8, "completion": "b b b b"}
LONG = {"prompt": "a " * 12, "completion": "b b"}


def prepare(*rows):
    return SFTTrainer(
        model=LlamaForCausalLM(CONFIG),
        args=SFTConfig(output_dir="out", max_length=10, use_cpu=True, report_to="none", bf16=False),
        train_dataset=Dataset.from_list(list(rows)),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=WORDS, eos_token="<eos>", unk_token="<unk>", pad_token="<pad>"
        ),
    )


for rows, left in (((SHORT, CUT), 2), ((SHORT, LONG), 1)):
    trainer = prepare(*rows)
    lengths = [len(each) for each in trainer.train_dataset["input_ids"]]
    print(f"{len(rows)} rows given, {len(lengths)} left, of {lengths} tokens")
    assert len(lengths) == left, lengths
try:
    prepare(LONG).train()
except ValueError as error:
    print(f"the long row alone: {error}")
    assert "num_samples" in str(error), error
else:
    raise AssertionError("the long row alone was trained")
PROGRAM
bars=$(grep -o "Dropping fully masked examples from train dataset: 100%[^[]*" errors)
echo "$bars"
[ "$(wc -l <<< "$bars")" = 3 ]
echo "As found: rows with long prompts are removed."
