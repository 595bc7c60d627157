"""The settings that the run had at a step: a resume, or a lack of memory, may change them."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from distributed_training import console
from distributed_training.checkpoints import other_runs
from distributed_training.checkpoints.format import list_checkpoints
from distributed_training.checkpoints.verify import read_manifest
from distributed_training.cli.parse import complete, parse_value
from distributed_training.errors import UserError
from distributed_training.files.json_types import JsonObject
from distributed_training.files.user_files import shown
from distributed_training.rank_shares import shown_shares
from distributed_training.ranks.context import DistContext
from distributed_training.records.results_types import wrong_key
from distributed_training.run.run_folder import RESULTS, read_results
from distributed_training.run.signatures import signature_at, signatures_of
from distributed_training.settings.settings import DEFAULTS, Settings

MICRO_BATCH = ("batch_size", "gradient_accumulation_steps")
# The ranks have met with them, so a difference is only reported.
CHOSEN_BEFORE = ("strategy", "precision")


class RunSettings(NamedTuple):
    """What the files of a run say about its settings at a step."""

    folder: Path
    step: int
    results: JsonObject  # results.json
    skipped: list[int]  # the steps of --skip_steps up to this one

    @classmethod
    def read(cls, folder: Path, step: int, ctx: DistContext) -> RunSettings:
        """Read them; all ranks call it, and rank 0 reads the files."""
        results = (read_results(folder / RESULTS) or {}) if ctx.is_main else {}
        is_usable = ctx.is_main and not wrong_key(results)
        skipped = _skipped_steps(folder, results) if is_usable else []
        results, skipped = ctx.broadcast_from_rank0((results, skipped))
        if key := wrong_key(results):
            raise UserError(f"{shown(folder / RESULTS)} is damaged: the type of {key}.")
        return cls(folder, step, results, [each for each in skipped if each <= step])

    @property
    def signature(self) -> JsonObject:
        """The run signature at the step."""
        return signature_at(self.results, self.step)

    @property
    def way(self) -> JsonObject:
        """The strategy, "world_size", device and precision of the run at the step."""
        told = self.signature.get("told") or {}
        names = {"strategy": "strategy", "world_size": "ranks", "precision": "precision"}
        return self.results | {key: told[name] for key, name in names.items() if name in told}

    def taken(self, settings: Settings, world_size: int) -> Settings:
        """Return the settings of a replay with those that the run had at the step.

        Those that a resume changed are taken, unless those of the replay differ from the last start
        of the run as well: then they are meant to differ.
        """
        changed = self._changed(settings)
        same_ranks = (self.signature.get("told") or {}).get("ranks") == world_size
        micro_batch = {name: changed.pop(name) for name in MICRO_BATCH if name in changed}
        if changed:
            settings = _completed(settings, changed)
        if micro_batch and same_ranks:
            sizes = {name: getattr(settings.training, name) for name in MICRO_BATCH} | micro_batch
            strategy = settings.strategy.with_micro_batches(*sizes.values())
            settings = settings.replace(**sizes, strategy_with_options=strategy)
        given = [*settings.training.skip_steps]
        if given in ([], (self.results.get("flags") or {}).get("skip_steps")):
            settings = settings.replace(skip_steps=tuple(self.skipped))
        return settings

    def _changed(self, settings: Settings) -> JsonObject:
        """Return the flags to take from the run, with their values at the step."""
        then, last = ((one.get("told") or {}) for one in (self.signature, self._last))
        now = {
            **settings.flags(),
            "rank_shares": shown_shares(settings.training.rank_shares),
            "reduce_dtype": settings.strategy.reduce_dtype,
        }
        # --auto_micro_batch and --batch_size auto: the run has chosen.
        chosen = settings.training.auto_micro_batch or settings.parallelism.to_choose
        return {
            name: then[name]
            for name in then.keys() & now.keys() - {*CHOSEN_BEFORE}
            if then[name] != now[name]
            and (now[name] == last.get(name) or (chosen and name in MICRO_BATCH))
        }

    @property
    def _last(self) -> JsonObject:
        return self.results.get("run_signature") or {}

    def check(self, identity: JsonObject, skip_steps: tuple[int, ...]) -> list[str]:
        """Check that the run trained the same model on the same data in the same order.

        Args:
            identity: the run signature of the replay, or the part of it that is known.
            skip_steps: of the replay; those from the step on do not matter.
        Returns:
            A clause about each other setting that differs, which may change the loss.
        Raises:
            UserError: it did not; the message names the differences.
        """
        where, found, others = ("in that run", "now"), [], []
        for part, clauses in (("hard", found), ("soft", found), ("told", others)):
            earlier = self.signature.get(part) or {}
            clauses += other_runs.differences(earlier, identity.get(part) or {}, *where)
        left_out = [each for each in self.skipped if each < self.step]
        if {each for each in skip_steps if each < self.step} != {*left_out}:
            steps = ",".join(map(str, left_out)) or "not given"
            found.append(f"--skip_steps {steps} in that run")
        if found:
            raise UserError(
                f"--replay: the settings are not those of the run in {self.folder} at step "
                f"{self.step}: {'; '.join(found)}. Use those of the run; {RESULTS} has its command."
            )
        return others

    def changed_since(self, start: int) -> list[str]:
        """Return a clause about each setting that the run had only in a part of some steps.

        Args:
            start: the step after which the steps are repeated, up to that of the replay.
        """
        clauses = []
        for one, following in pairwise(signatures_of(self.results)):
            if start + 1 < following["from_step"] <= self.step:
                then = f"up to step {following['from_step'] - 1} in that run"
                now = self.signature["told"]
                clauses += other_runs.differences(one["told"], now, then, "from then on and now")
        return clauses


def _completed(settings: Settings, changed: JsonObject) -> Settings:
    """Return the settings with other values of some flags, and what follows from them.

    Raises:
        UserError: a value contradicts the file of the strategy.
    """
    text = ", ".join(f"--{name} {value}" for name, value in sorted(changed.items()))
    console.print0(f"⏪ Settings of the run at that step: {text}")
    values, sources = dict(settings.as_given.values), dict(settings.as_given.sources)
    for name, value in changed.items():
        if value is None or value == DEFAULTS[name]:
            values.pop(name, None)
            sources.pop(name, None)
        else:
            values[name] = parse_value(name, value) if isinstance(value, str) else value
            sources[name] = RESULTS
    as_given = settings.as_given._replace(values=values, sources=sources)
    completed = complete(as_given, settings.parallelism.choice).settings
    return dataclasses.replace(completed, hub=settings.hub)


def _skipped_steps(folder: Path, results: JsonObject) -> list[int]:
    """Return the steps that a run left out; those of a killed run are in its last checkpoint."""
    if (found := results.get("skipped_steps")) is not None:
        return found
    found = {*((results.get("flags") or {}).get("skip_steps") or ())}
    for path in list_checkpoints(folder / "checkpoints"):
        manifest, problem = read_manifest(path)
        if not problem:
            found |= {*manifest["counters"]["skipped_steps"]}
            break
    return sorted(found)
