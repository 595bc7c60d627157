#!/usr/bin/env bash
# release: datasets 5.2.0
# finding: Dataset.from_list keeps only the keys of the first row: a key that only later rows have is dropped without a message. The same rows in a JSON Lines file, or in another order, keep it.
# guess: Each key becomes a column, with None in the rows that lack it.
# matters: A system prompt or a tool call that the first example lacks never reaches the model.
# instead: Give every row every key (None is enough), or read the rows from a file.
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
SHORT = {"prompt": "1 + 1", "answer": "2"}
LONG = {"prompt": "Hi", "answer": "Yes, sir?", "system": "Be polite."}

kept = {
    "from_list, short row first": datasets.Dataset.from_list([SHORT, LONG]),
    "from_list, long row first": datasets.Dataset.from_list([LONG, SHORT]),
}
Path("rows.jsonl").write_text(json.dumps(SHORT) + "\n" + json.dumps(LONG) + "\n")
kept["a file, short row first"] = datasets.load_dataset(
    "json", data_files="rows.jsonl", split="train", cache_dir="cache"
)
filled = [{name: row.get(name) for name in LONG} for row in (SHORT, LONG)]
kept["from_list, filled with None"] = datasets.Dataset.from_list(filled)
columns = {name: "system" in table.column_names for name, table in kept.items()}
for name, found in columns.items():
    print(f"{name}: {'has' if found else 'lacks'} the system prompts")
assert columns == dict(zip(kept, [False, True, True, True], strict=True)), columns
PROGRAM
echo "As found: from_list takes its columns from the first row."
