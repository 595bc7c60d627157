"""Settings: the sections of a run's settings. Each flag is a field of one section."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distributed_training.settings.cluster import ClusterSettings
from distributed_training.settings.command import CommandSettings, RunFileSettings
from distributed_training.settings.data import DataSettings
from distributed_training.settings.debug import DebugSettings
from distributed_training.settings.fields import Facts, Section, flags_of
from distributed_training.settings.model import ModelSettings
from distributed_training.settings.output import OutputSettings
from distributed_training.settings.parallelism import ParallelismSettings
from distributed_training.settings.trainer import TrainerFlags
from distributed_training.settings.training import TrainingSettings
from distributed_training.strategies.strategy import FlagValues, Strategy


@dataclass(frozen=True)
class Hub:
    """What is known about the Hugging Face hub before its libraries are imported."""

    offline: bool = False  # it was asked and must not be used, or the run needs nothing from it
    problem: str | None = None  # with --check: what is missing without it


class AsGiven(NamedTuple):
    """The flags of the command line and of the run file."""

    values: FlagValues
    sources: dict[str, str]  # where each is from


@dataclass(frozen=True)
class Settings:
    """All settings of a run, by section, in the order of --help.

    A function takes the sections or the values that it uses. Only the functions that pass settings
    on to many others, such as `main` and `train`, take all of them.
    """

    command: CommandSettings
    run_file: RunFileSettings
    model: ModelSettings
    data: DataSettings
    training: TrainingSettings
    parallelism: ParallelismSettings
    cluster: ClusterSettings
    output: OutputSettings
    debug: DebugSettings
    trainer: TrainerFlags
    # Not sections: known later than the flags; and what --strategy auto completes anew.
    hub: Hub = Hub()
    as_given: AsGiven = field(default_factory=lambda: AsGiven({}, {}))

    @classmethod
    def of_flags(cls, values: FlagValues, computed: FlagValues) -> Settings:
        """Create all sections.

        Args:
            values: of all flags, by name.
            computed: of the fields that are no flags, by name.
        """
        every = {**values, **computed}
        sections: dict[str, Any] = {}
        for name, section in SECTIONS.items():
            fields = [field.name for field in dataclasses.fields(section)]
            sections[name] = section(**{field: every[field] for field in fields})
        return cls(**sections)

    def replace(self, **values: object) -> Settings:
        """Return a copy with other values of fields; a new name is a KeyError.

        A value that was computed from a flag (`strategy_with_options`, `held_out_share`) is not
        computed anew.
        """
        changes: dict[str, dict[str, object]] = {}
        for name, value in values.items():
            changes.setdefault(SECTION_OF[name], {})[name] = value
        sections = {
            section: dataclasses.replace(getattr(self, section), **fields)
            for section, fields in changes.items()
        }
        return dataclasses.replace(self, **sections)

    @property
    def strategy(self) -> Strategy:
        """The strategy of the run, with the options of its file."""
        return self.parallelism.strategy_with_options

    def flags(self) -> FlagValues:
        """Return the values of all flags by name."""
        return {name: getattr(getattr(self, SECTION_OF[name]), name) for name in FLAGS}


SECTIONS: dict[str, type[Section]] = {
    "command": CommandSettings,
    "run_file": RunFileSettings,
    "model": ModelSettings,
    "data": DataSettings,
    "training": TrainingSettings,
    "parallelism": ParallelismSettings,
    "cluster": ClusterSettings,
    "output": OutputSettings,
    "debug": DebugSettings,
    "trainer": TrainerFlags,
}
FLAGS = {field.name: field for section in SECTIONS.values() for field in flags_of(section)}
FACTS: dict[str, Facts] = {name: field.metadata["facts"] for name, field in FLAGS.items()}
SECTION_OF = {
    field.name: name for name, section in SECTIONS.items() for field in dataclasses.fields(section)
}
DEFAULTS: FlagValues = {name: field.metadata["default"] for name, field in FLAGS.items()}
