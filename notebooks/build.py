"""Execute the notebooks and write them with their outputs.

    python notebooks/build.py [--smoke] [--out FOLDER] [NAME ...]

Each notebook is written as a py:percent file, `NN_name.py`; NAME is such a stem, and none means all. The cell tagged
`parameters` holds the numbers that decide how long it takes; with --smoke what its `smoke` metadata says is run behind
it. The kernel is the Python that runs this script, with this checkout first on its path.

What is written can be compared and published: no execution times, versions or machine in the metadata, cells numbered
in order, progress lines taken out. Anything else on standard error is a failure, since a reader would see it.
"""

import argparse
import os
import re
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
PROGRESS = re.compile(r"[\w .]+: ([\d,]+(/[\d,]+)?, )?\d+ s\n")
CELL_TIMEOUT_S = 600


class ThisPython(AsyncKernelManager):
    """Starts a kernel with the running interpreter, whatever kernels the machine has registered."""

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        quiet = "--IPKernelApp.log_level=ERROR"  # it would warn that a local socket isn't encrypted
        return KernelSpec(argv=[*command, quiet], display_name="Python 3", language="python")


def build(source: Path, out: Path, smoke: bool) -> Path:
    """Execute one notebook and write it to `out`. RuntimeError, or nbclient's own error, if it doesn't run cleanly."""
    notebook = jupytext.read(source)
    execute(with_smoke(notebook) if smoke else notebook, source.parent)
    tidy(notebook)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{source.stem}.ipynb"
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    return path


def with_smoke(notebook: Any) -> Any:
    """The notebook itself, its parameters set to their smoke values."""
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    cell.source = f"{cell.source}\n\n{cell.metadata['smoke']}"
    return notebook


def execute(notebook: Any, folder: Path) -> None:
    """Run all cells, in an IPython without the user's profile."""
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    import_module("matplotlib.font_manager")  # the first import on a machine makes a cache, and says so
    with tempfile.TemporaryDirectory() as profile:
        environment = os.environ | {"PYTHONPATH": path, "IPYTHONDIR": profile, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        client = NotebookClient(
            notebook,
            kernel_manager_class=ThisPython,
            timeout=CELL_TIMEOUT_S,
            resources={"metadata": {"path": str(folder)}},
            record_timing=False,
        )
        client.execute(env=environment)


def tidy(notebook: Any) -> None:
    """Leave nothing in the notebook that depends on the machine but what its cells print."""
    notebook.metadata = nbformat.from_dict({
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    })  # fmt: skip
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
        if cell.cell_type != "code":
            continue
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                output.text = PROGRESS.sub("", output.text)
                if output.text:
                    raise RuntimeError(f"cell {number} wrote to standard error: {output.text}")
        cell.outputs = [o for o in cell.outputs if not (o.output_type == "stream" and o.name == "stderr")]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Execute the notebooks and write them with their outputs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="stem of a notebook; default all")
    parser.add_argument("--smoke", action="store_true", help="with the few tokens of the smoke parameters")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to; default beside the sources")
    asked = parser.parse_args(arguments)
    known = {source.stem: source for source in sorted(HERE.glob("[0-9][0-9]_*.py"))}
    for name in asked.names or known:
        if name not in known:
            parser.error(f"no notebook {name!r}, expected one of: {', '.join(known)}")
        if asked.smoke and asked.out.resolve() == HERE:
            parser.error("--smoke needs --out: it would replace the committed notebook by one of few tokens")
        print(build(known[name], asked.out, asked.smoke))


if __name__ == "__main__":
    main(sys.argv[1:])
