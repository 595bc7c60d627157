#!/usr/bin/env bash
# release: datasets 5.2.0
# finding: In a JSON Lines file in which a column has several types, every string of it that is valid JSON is parsed: the answer "007" comes back as 7, and "null" as None.
# guess: Strings stay strings.
# matters: Answers that are numbers, code or quotations are trained as something else, or as nothing.
# instead: Keep each column of one type: write every content as a list of parts, or as a string.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet datasets==5.2.0 pyarrow==25.0.1
cd "$work"
HF_HOME=$work/home "$work/env/bin/python" - <<'PROGRAM'
import json
from pathlib import Path

import datasets

datasets.disable_progress_bars()
ANSWERS = ["007", "null", "true", '{"city": "Paris"}', '"quoted"', "plain"]


def read(answers):
    Path("rows.jsonl").write_text("".join(json.dumps({"answer": a}) + "\n" for a in answers))
    table = datasets.load_dataset("json", data_files="rows.jsonl", split="train", cache_dir="cache")
    return list(table["answer"])


only_strings = read(ANSWERS)
with_a_list = read([*ANSWERS, ["a", "b"]])[: len(ANSWERS)]
print("a column of strings:        ", only_strings)
print("a list in one more row:     ", with_a_list)
assert only_strings == ANSWERS
assert with_a_list == [7, None, True, {"city": "Paris"}, "quoted", "plain"], with_a_list
PROGRAM
echo "As found: a single list in a column changes the strings of the other rows."
