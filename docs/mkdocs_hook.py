"""Lets mkdocs build the site with the layout of the repository, so that every link works in both.

README.md is the start page. Files that are not Markdown are copied as they are, and a link to a
package leads to its `__init__.py`, whose docstring lists the modules.
"""

import re
import subprocess
from pathlib import Path

from mkdocs.structure.files import File, Files

PROJECT = Path(__file__).resolve().parent.parent


def on_config(config):
    """Name the anchors of titles as GitHub does."""
    config.mdx_configs["toc"] = {"slugify": anchor}
    return config


def anchor(title: str, _separator: str) -> str:
    """Return the anchor that GitHub gives a title."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def on_files(files, config):
    """Replace the files of docs/ by those of the repository that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.splitlines() if (PROJECT / name).is_file()]
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    place = (str(PROJECT), config.site_dir, config.use_directory_urls)
    return Files([*of_theme, *(File(name, *place) for name in names)])


def on_page_markdown(markdown, page, **_):
    """Let links to packages lead to a file, and leave out the markers of the tested blocks."""
    folder = (PROJECT / page.file.src_uri).parent

    def to_file(link: re.Match) -> str:
        of_package = "#" not in link[1] and (folder / link[1] / "__init__.py").is_file()
        return f"]({link[1].rstrip('/')}/__init__.py)" if of_package else link[0]

    markdown = re.sub(r"^[ ]*<!-- .* -->\n", "", markdown, flags=re.MULTILINE)
    return re.sub(r"\]\(([^)\s]+)\)", to_file, markdown)
