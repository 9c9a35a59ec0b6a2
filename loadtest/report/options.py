"""The options of `quire report`. Imports only argparse: the `quire` command needs them at each start."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "make one HTML page from benchmark results"
DESCRIPTION = (
    "Reads benchmark result files (all *.json below a folder, hidden folders left out) and writes one HTML page with "
    "plots that compares them. The page holds everything it needs: no network, no server. Runs are compared in the "
    "order of the arguments, and by date within a folder."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `loadtest.report.cli.report` reads."""
    parser.add_argument("paths", nargs="+", type=Path, metavar="FOLDER", help="folder with result files, or a file")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where the page goes (default: FOLDER/report.html, or FILE.html)"
    )
    parser.add_argument("--title", default="Quire benchmarks", metavar="T", help="title of the page")
    parser.add_argument(
        "--baseline", type=Path, metavar="FILE", help="result that ratios refer to (default: the first)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
