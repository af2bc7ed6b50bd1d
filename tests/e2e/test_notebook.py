"""The notebook runs from top to bottom on a CPU at its reduced size."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "launch" / "notebooks" / "train_on_a_gpu.ipynb"


def _with_parameters(notebook: nbformat.NotebookNode, **values: object) -> nbformat.NotebookNode:
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    assert f'REPOSITORY = "{Path(*[".."] * 2)}"' in cell.source
    assert (NOTEBOOK.parent / ".." / ".." / "pyproject.toml").is_file()
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in values.items())
    return notebook


def test_the_notebook_trains_and_calls_train_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")  # one device, as in Colab
    notebook = _with_parameters(
        nbformat.read(NOTEBOOK, as_version=4),
        REDUCED=True,
        REPOSITORY=str(NOTEBOOK.parents[2]),
        RUN_DIR=str(tmp_path / "run"),
    )
    NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = "".join(str(output.get("text", "")) for cell in notebook.cells for output in cell.get("outputs", []))
    assert "bits per byte" in outputs
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))
