"""`quire report`: reads results, writes the page."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from loadtest.report import options as command_line
from loadtest.report.load import NothingToRead, read
from loadtest.report.model import Results
from loadtest.report.page import page

_MAX_LISTED = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the arguments and runs `report`."""
    parser = argparse.ArgumentParser(prog="quire report", description=command_line.DESCRIPTION)
    command_line.add_arguments(parser)
    return report(parser.parse_args(argv))


def report(options: argparse.Namespace) -> int:
    """Writes the page and says where it is. 0, or 2 with a message on stderr where there is nothing to show.

    options: as `loadtest.report.options.add_arguments` makes them.
    """
    try:
        results = read(options.paths)
        _check(options, results)
        out = _out(options, results)
        _write(out, page(results, options.title, options.baseline))
    except (NothingToRead, _Refused) as error:
        print(f"quire report: {error}", file=sys.stderr)
        return 2
    for unread in results.unread:
        print(f"quire report: left out {unread.file}: {unread.reason}", file=sys.stderr)
    print(f"{len(results.runs)} {'run' if len(results.runs) == 1 else 'runs'}: {out}")
    if options.open and not webbrowser.open(out.resolve().as_uri()):
        print("quire report: no browser could be started; open the file yourself", file=sys.stderr)
    return 0


class _Refused(Exception):
    """What the user asked for can't be done; the message says what to do instead."""


def _check(options: argparse.Namespace, results: Results) -> None:
    given = ", ".join(str(path) for path in options.paths)
    if not results.runs:
        reasons = [f"\n  {unread.file}: {unread.reason}" for unread in results.unread[:_MAX_LISTED]]
        if len(results.unread) > _MAX_LISTED:
            reasons.append(f"\n  and {len(results.unread) - _MAX_LISTED} more")
        raise _Refused(
            f"no benchmark result in {given}: run a benchmark first, such as `make bench-engine`, which writes into "
            f"bench-results, or give another folder{''.join(reasons)}"
        )
    if options.baseline is not None:
        wanted = options.baseline.resolve()
        if not any(run.path.resolve() == wanted for run in results.runs):
            names = ", ".join(str(run.path) for run in results.runs)
            raise _Refused(f"--baseline {options.baseline} is none of the results that were read: {names}")


def _out(options: argparse.Namespace, results: Results) -> Path:
    first: Path = options.paths[0]
    # One file's page has the file's name: beside it may be the page of all.
    out: Path = options.out or (first / "report.html" if first.is_dir() else first.with_suffix(".html"))
    if out.is_dir():
        raise _Refused(f"--out {out} is a folder: give a file name, such as {out / 'report.html'}")
    if out.suffix == ".json" or any(run.path.resolve() == out.resolve() for run in results.runs):
        raise _Refused(f"--out {out} is the name of a result, and the page is HTML: give another, such as report.html")
    return out


def _write(out: Path, text: str) -> None:
    """A half-written page never stands under the name."""
    temporary = out.with_name(out.name + ".tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # A file's name, or a string of its JSON, may hold what has no UTF-8.
        temporary.write_bytes(text.encode("utf-8", "replace"))
        temporary.replace(out)
    except OSError as error:
        raise _Refused(f"{out} can't be written ({error.strerror or error}): give another file with --out") from error
