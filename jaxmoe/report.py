"""One HTML file and PNGs about one or more runs: `python -m jaxmoe.report RUN [RUN ...] [--open] [--output DIR]`."""

import argparse
import datetime
import importlib.util
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from jaxmoe.config import UserError, fail_on_user_error
from jaxmoe.config.whole_file import write_whole
from jaxmoe.runtime.report_read import read_runs

PAGE = "report.html"


def write_report(paths: Sequence[str], output: Path | None = None) -> Path:
    """Writes report.html and the PNGs; returns the page's path.

    Args:
        paths: run folders.
        output: folder for the files; `report` inside the first run folder where not given.

    Raises:
        UserError: a path that is no run folder, an output that cannot be written, or matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("a report needs the package matplotlib, which is not installed; pip install 'jaxmoe[demo]'")
    from jaxmoe.runtime.report_page import draw_parts, render_page

    runs = read_runs(paths)
    parts = draw_parts(runs)
    page = render_page(runs, parts, datetime.datetime.now(datetime.UTC))
    folder = runs[0].path / "report" if output is None else output
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in (picture for part in parts for picture in part.pictures):
            write_whole(folder / f"{picture.key}.png", picture.png())
        write_whole(folder / PAGE, page)
    except OSError as error:
        raise UserError(f"--output {folder}: cannot be written ({error}); give a folder that can") from error
    return folder / PAGE


@fail_on_user_error()
def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m jaxmoe.report", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder, of a finished or a running training")
    parser.add_argument("--open", action="store_true", help="show the page in the browser")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for the files; default: RUN/report")
    options = parser.parse_args(arguments)
    page = write_report(options.runs, options.output)
    print(page)
    if options.open and not webbrowser.open(page.resolve().as_uri()):
        print(f"no browser found; open {page} by hand", file=sys.stderr)


if __name__ == "__main__":
    main()
