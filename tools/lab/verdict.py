"""What a check found: a list of findings, each right, or wrong with a name and a reason."""

from typing import NamedTuple


class Finding(NamedTuple):
    """One thing that is right or wrong in what a student handed in.

    Attributes:
        name: of a known mistake, for the report; "" if it is right.
        text: what was found, and for a mistake why it is one; never the answer.
    """

    name: str
    text: str

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong here."""
        return not self.name

    def __str__(self) -> str:
        return f"{'✅' if self.is_right else '❌'} {self.text}"


def right(text: str) -> Finding:
    """Return a finding about what is right."""
    return Finding("", text)


def wrong(name: str, text: str) -> Finding:
    """Return a finding about a mistake."""
    return Finding(name, text)


def passed(findings: list[Finding]) -> bool:
    """Return whether a check that found this is passed."""
    return bool(findings) and all(finding.is_right for finding in findings)
