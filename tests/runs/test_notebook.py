"""The notebook runs from its first cell to its last, on a CPU and without network."""

import json

import nbformat
import pytest
from conftest import free_port
from nbclient import NotebookClient
from project_copy import copy_project

pytestmark = pytest.mark.slow

SMALL = {
    "MODEL": "tiny-gpt2",
    "WEIGHTS": "--from_scratch",
    "DATASET": "pydocs",
    "SEQ_LENGTH": "32",
    "BATCH_SIZE": "2",
    "MAX_STEPS": "4",
    "STRATEGIES": "dp fsdp",
    "COMPARED_STEPS": "3",
    "INSTALL": "0",
}


def test_the_notebook_runs(tmp_path, monkeypatch):
    project = copy_project(tmp_path / "project")
    notebook = nbformat.read(project / "notebooks" / "two_t4.ipynb", as_version=4)
    nbformat.validate(notebook)
    (settings,) = (c for c in notebook.cells if "parameters" in c.metadata.get("tags", ()))
    assert all(f'"{name}"' in settings.source for name in SMALL)
    for name, value in (SMALL | {"PET_MASTER_PORT": str(free_port()), "CONTROL": "0"}).items():
        monkeypatch.setenv(name, value)
    resources = {"metadata": {"path": str(project / "notebooks")}}
    NotebookClient(notebook, timeout=300, resources=resources).execute()
    printed = ["".join(o.get("text", "") for o in c.get("outputs", ())) for c in notebook.cells]
    text = "".join(printed)
    assert "zero2" in text and "Training Complete" in text and "Equal losses" in text
    images = [o for c in notebook.cells for o in c.get("outputs", ()) if "data" in o]
    assert sum("image/png" in o["data"] for o in images) == 2  # the curve and the comparison
    results = json.loads((project / "runs" / "notebook" / "results.json").read_text())
    assert (results["world_size"], results["steps"]) == (2, 4)
    assert (project / "runs" / "notebook" / "report.html").is_file()
