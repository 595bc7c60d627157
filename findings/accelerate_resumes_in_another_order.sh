#!/usr/bin/env bash
# release: accelerate 1.15.0, torch 2.13.0
# finding: load_state and skip_first_batches, the documented way to resume within an epoch, shuffle anew with a default Accelerator: of 20 examples some are trained twice and some never. With use_seedable_sampler=True none is lost.
# guess: The epoch continues with exactly the examples that are left.
# matters: A run that is stopped and resumed trains on other data than an uninterrupted one, and its loss on repeated examples looks better.
# instead: Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)), before the first run.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --no-compile accelerate==1.15.0 torch==2.13.0
cd "$work"
HF_HOME=$work/home "$work/env/bin/python" - <<'PROGRAM'
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed

EXAMPLES, STOP = range(20), 4


def start(options):
    """A seeded run: accelerator and the loader of batches of two."""
    set_seed(1)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    loader = torch.utils.data.DataLoader(list(EXAMPLES), batch_size=2, shuffle=True)
    model = torch.nn.Linear(1, 1)
    _, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters()), loader)
    return accelerator, loader


def after_a_resume(name, options):
    """The examples before the stop, after it without a stop, and after a resume."""
    accelerator, loader = start(options)
    before, rest = [], []
    for number, batch in enumerate(loader, start=1):
        (before if number <= STOP else rest).extend(batch.tolist())
        if number == STOP:
            accelerator.save_state(name)
    accelerator, loader = start(options)
    accelerator.load_state(name)
    resumed = [each for batch in skip_first_batches(loader, STOP) for each in batch.tolist()]
    return before, rest, resumed


for name, options in (("default", {}), ("seedable", {"use_seedable_sampler": True})):
    before, rest, resumed = after_a_resume(name, options)
    twice, never = set(before) & set(resumed), set(EXAMPLES) - set(before) - set(resumed)
    print(f"{name}: uninterrupted {rest}, resumed {resumed}: "
          f"{len(twice)} twice, {len(never)} never")
    assert (resumed == rest) == (name == "seedable") == (not never), (rest, resumed)
PROGRAM
echo "As found: the default sampler resumes in another order."
