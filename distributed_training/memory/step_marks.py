"""The phases of one optimizer step whose memory is measured."""


class StepMarks:
    """What is in memory at the end of each phase of one step: nothing is recorded."""

    start = 0  # live bytes at the beginning of the step

    def begin(self) -> None:
        """Start recording."""

    def mark(self, phase: str) -> None:
        """Record the end of a phase."""

    def end(self) -> list[tuple[str, int, int]]:
        """Return (phase, live bytes at its end, peak bytes within it) of each mark."""
        return []
