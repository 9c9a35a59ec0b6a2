"""Finds and reads result files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from loadtest.report.fields import Fields, Malformed, as_text
from loadtest.report.model import Results, Run, Unread
from loadtest.report.parse import parse

_HIDDEN_ARGUMENTS = frozenset({"out"})  # where the file lay first says nothing about the run


class NothingToRead(Exception):
    """A path that isn't there. The message says which."""


def find(paths: Sequence[Path]) -> list[tuple[Path, str, int]]:
    """Files, the names to show for them, and the index of the argument that each came from. Each file once.

    Of a folder: all *.json below it, links to folders and hidden folders left out. Raises NothingToRead.
    """
    found: dict[Path, tuple[Path, str, int]] = {}
    for index, path in enumerate(paths):
        if path.is_dir():
            # With several arguments, names below two folders may be the same.
            prefix = f"{path.resolve().name}/" if len(paths) > 1 else ""
            for file in _below(path):
                found.setdefault(file.resolve(), (file, prefix + file.relative_to(path).as_posix(), index))
        elif path.exists():
            found.setdefault(path.resolve(), (path, path.name, index))
        else:
            raise NothingToRead(f"{path} is not there: give a folder with result files, or the files themselves")
    return _with_parents_where_ambiguous(list(found.values()))


def read(paths: Sequence[Path]) -> Results:
    """Reads everything below the paths. Runs are ordered by argument, then date, then name.

    Files that are no results are in `unread` with the reason; only a path that isn't there raises (NothingToRead).
    """
    runs: list[tuple[int, Run]] = []
    unread = []
    for path, name, index in find(paths):
        try:
            runs.append((index, read_file(path, name)))
        except Malformed as error:
            unread.append(Unread(name, str(error)))
    runs.sort(key=lambda item: (item[0], item[1].date is None, item[1].date or "", item[1].file))
    return Results(tuple(run for _, run in runs), tuple(unread))


def read_file(path: Path, name: str) -> Run:
    """One result file. Raises Malformed, whatever is wrong with it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Malformed(f"can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise Malformed("is not UTF-8 text") from error
    except RecursionError as error:
        raise Malformed("is nested too deeply") from error
    except ValueError as error:
        raise Malformed(f"is not JSON: {error}") from error
    document = Fields(data)
    kind, content, warnings = parse(document)
    machine = document.child("machine")
    return Run(
        path=path,
        file=name,
        kind=kind,
        date=document.text("date"),
        commit=document.text("commit"),
        uncommitted=document.flag("uncommitted_changes"),
        machine=_machine(machine),
        versions=document.texts("versions"),
        label=document.text("label"),
        model=_model(document),
        arguments={key: value for key, value in document.texts("arguments").items() if key not in _HIDDEN_ARGUMENTS},
        warnings=(*warnings, *_busy(machine)),
        content=content,
    )


def _model(document: Fields) -> str | None:
    places = (("model", document), ("model", document.child("arguments")), ("model_id", document.child("serve_args")))
    found = [place.raw(key) for key, place in places]
    # A comparison of servers says more of its model than the name.
    names = (value.get("name") if isinstance(value, dict) else value for value in found)
    return next((as_text(name) for name in names if name), None)


def _below(folder: Path) -> list[Path]:
    files = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found = [Path(place) / name for name in sorted(names) if name.endswith(".json")]
        # Reading a pipe would never end; a link to nowhere stays in, to be named.
        files += [path for path in found if path.is_file() or not path.exists()]
    return files


def _with_parents_where_ambiguous(found: list[tuple[Path, str, int]]) -> list[tuple[Path, str, int]]:
    """Puts the folder before names that two files would share, and a number where that is not enough."""
    names = [name for _, name, _ in found]
    for depth in (2, 3):
        repeated = {name for name in names if names.count(name) > 1}
        names = ["/".join(path.resolve().parts[-depth:]) if name in repeated else name
                 for (path, _, _), name in zip(found, names, strict=True)]  # fmt: skip
    seen: dict[str, int] = {}
    result = []
    for (path, _, index), name in zip(found, names, strict=True):
        seen[name] = seen.get(name, 0) + 1
        result.append((path, name if seen[name] == 1 else f"{name} ({seen[name]})", index))
    return result


def _machine(machine: Fields) -> str:
    cores, memory, load = (machine.number(name) for name in ("cores", "memory_bytes", "load_average_1min"))
    parts = [
        machine.text("cpu") or "",
        f"{cores:g} cores" if cores is not None else "",
        f"{memory / 2**30:.0f} GiB" if memory is not None else "",
        machine.text("system") or "",
        f"load {load:.1f} before" if load is not None else "",
    ]
    return ", ".join(part for part in parts if part) or "unknown"


def _busy(machine: Fields) -> list[str]:
    cores, load = machine.number("cores"), machine.number("load_average_1min")
    # The benchmark before this one leaves a little.
    if cores is None or load is None or load <= 1.25 * cores:
        return []
    return [f"other programs kept the machine busy before it began: load {load:.1f} on {cores:g} cores"]
