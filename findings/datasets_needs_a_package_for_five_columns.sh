#!/usr/bin/env bash
# release: datasets 5.2.0
# finding: A JSON Lines file with the columns id, source, model, system_prompt and messages, alone or among others, cannot be loaded (DatasetGenerationError, caused by a missing package, teich); without any one of the five it loads.
# guess: The names of columns do not matter.
# matters: A collection of chats with these common names cannot be loaded, and the message names a package that has nothing to do with it.
# instead: Rename one of the columns, or read the file without datasets.
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
datasets.logging.set_verbosity_error()
ROW = {
    "id": "1",
    "source": "a book",
    "model": "none",
    "system_prompt": "Be short.",
    "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
}


def outcome(row, name):
    Path(f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    try:
        table = datasets.load_dataset(
            "json", data_files=f"{name}.jsonl", split="train", cache_dir="cache"
        )
    except datasets.exceptions.DatasetGenerationError as error:
        return f"{type(error).__name__}: {type(error.__cause__).__name__}: {error.__cause__}"
    return f"loaded, {table.num_rows} row"


whole = outcome(ROW, "whole")
others = {
    f"without {key}": outcome({k: v for k, v in ROW.items() if k != key}, f"without_{key}")
    for key in ROW
}
more = outcome({**ROW, "score": 1}, "more")
print("all five columns:", whole)
print("with one more column:", more)
for name, found in others.items():
    print(f"{name}: {found}")
for found in (whole, more):
    assert "ImportError" in found and "teich" in found, found
assert set(others.values()) == {"loaded, 1 row"}, others
PROGRAM
echo "As found: these five columns need a further package."
