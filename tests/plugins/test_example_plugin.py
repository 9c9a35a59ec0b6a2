"""The example plugin, installed as pip would lay it out, loads by name, takes its option, and conforms."""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

import pytest

import plugins
from mlx_engine.errors import PluginError
from plugins.conformance import check_scheduler
from plugins.registry import SCHEDULERS, create, installed
from tests.plugins.builders import decoding, request_view, scheduler_view

EXAMPLE = Path(plugins.__file__).parent / "examples" / "quire_sjf"


@pytest.fixture
def sjf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Installs the example from its own pyproject.toml into a folder on sys.path; its policy's name."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    shutil.copy(EXAMPLE / "quire_sjf.py", tmp_path)
    info = tmp_path / f"quire_sjf-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    ((name, target),) = project["entry-points"][SCHEDULERS].items()
    (info / "entry_points.txt").write_text(f"[{SCHEDULERS}]\n{name} = {target}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "quire_sjf", raising=False)
    return str(name)


def test_it_is_found_and_conforms(sjf: str) -> None:
    assert ("quire-sjf", "0.1.0") in [(policy.distribution, policy.version) for policy in installed(SCHEDULERS)]
    check_scheduler(lambda: create(SCHEDULERS, sjf, kwargs={}, options={}))


def test_short_jobs_go_first_but_decodes_before_all(sjf: str) -> None:
    policy = create(SCHEDULERS, sjf, kwargs={}, options={"prompt_weight": 0.2})
    waiting = (request_view("long", max_tokens=50), request_view("short", arrival=9, max_tokens=5))
    view = scheduler_view(running=(decoding("now"),), waiting=waiting)
    assert [proposal.request_id for proposal in policy.schedule(view)] == ["now", "short", "long"]


def test_its_unknown_options_are_refused(sjf: str) -> None:
    with pytest.raises(PluginError, match=r"quire-sjf 0\.1\.0\) has no option 'promt_weight'. Did you mean"):
        create(SCHEDULERS, sjf, kwargs={}, options={"promt_weight": 0.2})
