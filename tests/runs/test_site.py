"""The documents become a site whose links and anchors are checked. `make docs` builds it, too."""

import subprocess
import sys

import pytest
from project_copy import copy_project

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    copy = copy_project(tmp_path_factory.mktemp("site") / "project")
    subprocess.run(["git", "init", "--quiet"], cwd=copy, check=True)
    return copy


def build(project):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(command, cwd=project, capture_output=True, text=True)


def test_the_site_has_the_layout_of_the_repository(project):
    built = build(project)
    assert built.returncode == 0, built.stderr
    site = project / "site"
    assert 'href="docs/HOW_IT_WORKS.html"' in (site / "index.html").read_text()  # README.md
    assert (
        'href="distributed_training/strategies/__init__.py"'
        in (site / "CONTRIBUTING.html").read_text()
    )
    assert (site / "distributed_training" / "strategies" / "__init__.py").is_file()


def test_a_broken_link_is_an_error(project):
    links, page = (
        ("none.md", "README.md#none", "distributed_training/none.py"),
        project / "SECURITY.md",
    )
    page.write_text(page.read_text() + "".join(f"\n[broken]({link})\n" for link in links))
    built = build(project)
    assert built.returncode == 1 and all(link in built.stderr for link in links)
