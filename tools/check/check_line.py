"""The result of one check of --check, as a line."""

from typing import NamedTuple

OK, WARNING, PROBLEM = "✅", "⚠️ ", "❌"


class Line(NamedTuple):
    """Result of one check, and what to do if it is not OK."""

    status: str
    name: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.status} {self.name:13} {self.text}"
        return f"{text}: {self.remedy}" if self.remedy else text


def line_of(is_ok: bool, name: str, text: str, remedy: str, status: str = WARNING) -> Line:
    """Return the result of a check; `status` and `remedy` are used unless it is OK."""
    return Line(OK, name, text) if is_ok else Line(status, name, text, remedy)
