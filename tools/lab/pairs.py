"""Training data of the tasks: pairs of a prompt and an answer, from the Python reference."""

import json
import re
from pydoc_data.topics import topics
from random import Random


def make_pairs(count: int, seed: int) -> list[dict[str, str]]:
    """Return pairs whose answers have 1 to 14 words; each is one sequence of a run.

    The lengths differ: if all sequences have the same, faults of a mean are invisible.
    """
    text = "\n".join(topics[name] for name in sorted(topics))[:60_000]
    words, random, pairs = re.findall("[A-Za-z]+", text), Random(seed), []
    for _ in range(count):
        start = random.randrange(len(words) - 40)
        middle = start + random.randint(2, 4)
        answer = words[middle : middle + random.randint(1, 14)]
        prompt = " ".join(words[start:middle])
        pairs.append({"prompt": prompt, "completion": f" {' '.join(answer)}"})
    return pairs


def as_lines(pairs: list[dict[str, str]]) -> str:
    """Return the text of a .jsonl file."""
    return "".join(json.dumps(pair) + "\n" for pair in pairs)
