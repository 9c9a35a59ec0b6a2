"""The registry loads what is named and nothing else, and says exactly what is wrong with what it can't load."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mlx_engine.errors import ConfigError, PluginError
from plugins.prefix_caches.radix import RadixPrefixCache
from plugins.registry import (
    ATTENTION_BACKENDS,
    DRAFTERS,
    KV_MANAGERS,
    PREFIX_CACHES,
    SCHEDULERS,
    create,
    create_drafter,
    installed,
    load_policy,
)
from plugins.schedulers.fcfs import FCFSScheduler
from plugins.schedulers.priority import PriorityScheduler

HEADER = """
from mlx_engine.interfaces import KVCacheManager, PrefixCache, SchedulerPolicy
from plugins.schedulers.fcfs import FCFSScheduler
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder on sys.path, as site-packages is."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, distribution: str, source: str, *, group: str = SCHEDULERS, name: str = "theirs") -> None:
    """Installs a distribution 1.2.3 with one module that offers its class Policy under a name."""
    module = distribution.replace("-", "_")
    (site / f"{module}.py").write_text(HEADER + source)
    info = site / f"{module}-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2.3\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:Policy\n")
    sys.modules.pop(module, None)


def test_builtins_are_on_offer_through_entry_points() -> None:
    groups = (SCHEDULERS, KV_MANAGERS, PREFIX_CACHES, DRAFTERS)
    offers = {group: {policy.name for policy in installed(group)} for group in groups}
    assert offers[SCHEDULERS] >= {"fcfs", "wave", "priority"}
    assert offers[KV_MANAGERS] >= {"paged", "contiguous"}
    assert offers[PREFIX_CACHES] >= {"radix", "hash_chain", "none"}
    assert offers[DRAFTERS] >= {"ngram"}
    assert load_policy(SCHEDULERS, "fcfs") is FCFSScheduler


def test_no_drafter_is_none_and_takes_no_options() -> None:
    assert create_drafter("none", {}) is None
    with pytest.raises(PluginError, match="name a drafter"):
        create_drafter("none", {"num_tokens": 3})
    with pytest.raises(PluginError, match="no option 'tokens'"):
        create_drafter("ngram", {"tokens": 3})
    with pytest.raises(PluginError, match="Installed: ngram"):
        create_drafter("medusa", {})


def test_attention_backends_are_checked_against_their_protocol(site: Path) -> None:
    install(site, "bad-backend", "class Policy:\n    def state(self): ...\n", group=ATTENTION_BACKENDS)
    with pytest.raises(PluginError, match="does not implement begin_step, dispatch_counts, initialize of Attention"):
        load_policy(ATTENTION_BACKENDS, "theirs")


def test_a_third_party_policy_loads_by_name(site: Path) -> None:
    install(site, "good-plugin", "class Policy(FCFSScheduler): pass\n")
    assert load_policy(SCHEDULERS, "theirs").__module__ == "good_plugin"
    found = [policy for policy in installed(SCHEDULERS) if policy.name == "theirs"]
    assert [(policy.distribution, policy.version) for policy in found] == [("good-plugin", "1.2.3")]


def test_only_the_named_plugin_is_imported(site: Path) -> None:
    install(site, "broken-plugin", "raise RuntimeError('imported')\n")
    assert load_policy(SCHEDULERS, "fcfs") is FCFSScheduler
    installed(SCHEDULERS)
    assert "broken_plugin" not in sys.modules


def test_unknown_name_lists_what_is_installed_and_the_nearest() -> None:
    with pytest.raises(PluginError, match=r"no plugin 'fcsf'.* Did you mean 'fcfs'\?.*priority \(mlx-quire "):
        load_policy(SCHEDULERS, "fcsf")


def test_unknown_group() -> None:
    with pytest.raises(PluginError, match=r"no plugin group 'mlx_quire\.samplers'"):
        load_policy("mlx_quire.samplers", "greedy")


def test_two_distributions_with_one_name_are_both_named(site: Path) -> None:
    for distribution in ("one-plugin", "two-plugin"):
        install(site, distribution, "class Policy(FCFSScheduler): pass\n")
    with pytest.raises(PluginError, match=r"one-plugin 1.2.3 .*two-plugin 1.2.3 .*Uninstall all but one"):
        load_policy(SCHEDULERS, "theirs")


def test_import_error_is_chained(site: Path) -> None:
    install(site, "broken-plugin", "import no_such_module_of_ours\n")
    with pytest.raises(PluginError, match=r"theirs.*broken-plugin 1\.2\.3\) can't be imported: ModuleNotFound") as info:
        load_policy(SCHEDULERS, "theirs")
    assert isinstance(info.value.__cause__, ModuleNotFoundError)


SCHEDULE = "    def schedule(self, view): return []\n"
VICTIM = "    def select_victim(self, view, request_id): return None\n"
BASE = "class Policy(SchedulerPolicy):\n"
CACHE = "from plugins.prefix_caches.none import NoPrefixCache\nclass Policy(NoPrefixCache):\n"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def Policy(): ...\n", "is not a class"),
        ("class Policy:\n" + SCHEDULE + VICTIM, "is not a subclass of SchedulerPolicy"),
        (BASE + "    interface_version = 99\n" + SCHEDULE + VICTIM, "interface version 99; this is version 1"),
        (BASE + SCHEDULE, "does not implement select_victim of SchedulerPolicy"),
        (
            BASE + SCHEDULE + "    def select_victim(self, view, req): return None\n",
            r"defines select_victim\(view, req\); its arguments must be \(view, request_id\)",
        ),
        (
            BASE + VICTIM + "    def schedule(self): return []\n",
            r"defines schedule\(\); its arguments must be \(view\)",
        ),
        (BASE + VICTIM + "    def schedule(self, view, clock): return []\n", r"schedule\(view, clock\)"),
        (BASE + VICTIM + "    def schedule(self, view, *, clock): return []\n", "its arguments must be"),
        (BASE + VICTIM + "    schedule = 3\n", "has schedule = 3, which must be a method"),
        (BASE + VICTIM + "    @staticmethod\n    def schedule(view): return []\n", "schedule as a staticmethod"),
        (
            BASE + SCHEDULE + VICTIM + "    def on_request_finished(self, req): ...\n",
            r"defines on_request_finished\(req\); its arguments must be \(request\)",
        ),
    ],
)
def test_a_broken_scheduler_is_named_with_its_problem(site: Path, source: str, problem: str) -> None:
    install(site, "broken-plugin", source)
    with pytest.raises(PluginError, match=rf"'theirs' \(broken_plugin:Policy, from broken-plugin 1.2.3\).*{problem}"):
        load_policy(SCHEDULERS, "theirs")


@pytest.mark.parametrize(
    "schedule",
    ["def schedule(self, view, clock=None): return []", "def schedule(self, *args, **kwargs): return []"],
)
def test_methods_that_take_more_than_asked_are_fine(site: Path, schedule: str) -> None:
    install(site, "good-plugin", BASE + VICTIM + f"    {schedule}\n")
    assert load_policy(SCHEDULERS, "theirs").__name__ == "Policy"


def test_dropping_the_default_of_an_optional_argument_is_refused(site: Path) -> None:
    source = "from plugins.kv_managers.paged import PagedKVManager\nclass Policy(PagedKVManager):\n"
    source += "    def allocate_slots(self, request_id, num_tokens, match): return False\n"
    install(site, "broken-plugin", source, group=KV_MANAGERS)
    with pytest.raises(PluginError, match="allocate_slots"):
        load_policy(KV_MANAGERS, "theirs")


def test_a_method_in_place_of_a_property_is_refused(site: Path) -> None:
    install(site, "broken-plugin", CACHE + "    def num_blocks(self): return 0\n", group=PREFIX_CACHES)
    with pytest.raises(PluginError, match="method num_blocks, which must be a property"):
        load_policy(PREFIX_CACHES, "theirs")


def test_create_passes_engine_arguments_and_options() -> None:
    assert isinstance(create(PREFIX_CACHES, "radix", kwargs={"block_size": 4}, options={}), RadixPrefixCache)
    policy = create(SCHEDULERS, "priority", kwargs={}, options={"ageing_seconds": 5.0})
    assert isinstance(policy, PriorityScheduler)
    assert policy._ageing_seconds == 5.0


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(
        PluginError, match=r"no option 'ageing_second'. Did you mean 'ageing_seconds'\? Its options are"
    ):
        create(SCHEDULERS, "priority", kwargs={}, options={"ageing_second": 5.0})
    with pytest.raises(PluginError, match=r"'fcfs'.*no option 'fast'. It has no options"):
        create(SCHEDULERS, "fcfs", kwargs={}, options={"fast": True})


def test_options_can_not_replace_what_the_engine_gives() -> None:
    with pytest.raises(PluginError, match="gets block_size from the engine"):
        create(PREFIX_CACHES, "radix", kwargs={"block_size": 4}, options={"block_size": 8})


def test_constructor_that_refuses_the_engines_arguments(site: Path) -> None:
    install(site, "broken-plugin", CACHE + "    def __init__(self): ...\n", group=PREFIX_CACHES)
    with pytest.raises(PluginError, match="must accept block_size in its constructor, but doesn't take block_size"):
        create(PREFIX_CACHES, "theirs", kwargs={"block_size": 4}, options={})


def test_missing_required_option_is_named(site: Path) -> None:
    install(site, "needy-plugin", "class Policy(FCFSScheduler):\n    def __init__(self, *, target): ...\n")
    with pytest.raises(PluginError, match="needs the option target"):
        create(SCHEDULERS, "theirs", kwargs={}, options={})


def test_what_a_constructor_raises_is_chained() -> None:
    with pytest.raises(PluginError, match=r"'priority'.*can't be constructed: ValueError: ageing_seconds") as info:
        create(SCHEDULERS, "priority", kwargs={}, options={"ageing_seconds": -1})
    assert isinstance(info.value.__cause__, ValueError)
    kwargs = {"num_blocks": 4, "block_size": 4, "max_model_len": 8, "prefix_cache": RadixPrefixCache(block_size=4)}
    with pytest.raises(PluginError, match="set prefix_cache to 'none'") as info:
        create(KV_MANAGERS, "contiguous", kwargs=kwargs, options={})
    assert isinstance(info.value.__cause__, ConfigError)
