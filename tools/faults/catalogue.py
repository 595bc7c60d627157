"""All faults of the museum."""

from tools.faults import data, export, gradients, memory, resume
from tools.faults.fault import GROUPS, Fault

FAULTS: tuple[Fault, ...] = (
    *gradients.FAULTS,
    *data.FAULTS,
    *resume.FAULTS,
    *export.FAULTS,
    *memory.FAULTS,
)


def by_group() -> dict[str, list[Fault]]:
    """Return the faults of each group, in the order of the page."""
    return {group: [fault for fault in FAULTS if fault.group == group] for group in GROUPS}
