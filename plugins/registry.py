"""Finds policies by entry-point name, loads only the one that is named, and checks it before the engine starts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from mlx_engine.errors import PluginError, nearest_name
from mlx_engine.interfaces import (
    INTERFACE_VERSION,
    AttentionBackend,
    Drafter,
    KVCacheManager,
    PrefixCache,
    SchedulerPolicy,
)

SCHEDULERS = "mlx_quire.schedulers"
KV_MANAGERS = "mlx_quire.kv_managers"
PREFIX_CACHES = "mlx_quire.prefix_caches"
ATTENTION_BACKENDS = "mlx_quire.attention_backends"
DRAFTERS = "mlx_quire.drafters"
NO_DRAFTER = "none"

_INTERFACES: Mapping[str, type[Any]] = {
    SCHEDULERS: SchedulerPolicy,
    KV_MANAGERS: KVCacheManager,
    PREFIX_CACHES: PrefixCache,
    ATTENTION_BACKENDS: AttentionBackend,
    DRAFTERS: Drafter,
}


@dataclass(frozen=True, slots=True)
class InstalledPolicy:
    """A policy that some distribution offers; not imported, so it may still be broken."""

    name: str
    distribution: str
    version: str


def installed(group: str) -> list[InstalledPolicy]:
    """The policies on offer in a group, by name. Imports none of them."""
    found = [InstalledPolicy(point.name, *_origin(point)) for point in entry_points(group=group)]
    return sorted(found, key=lambda policy: (policy.name, policy.distribution))


def load_policy(group: str, name: str) -> type[Any]:
    """The class behind a name, imported and checked against its interface.

    Raises PluginError, naming the plugin and its distribution, for: an unknown name, a name that two distributions
    offer, an import that fails, another interface version, missing methods, and methods with other argument names.
    """
    interface = _interface(group)
    point = _find(group, name)
    try:
        policy = point.load()
    except Exception as exc:
        raise PluginError(f"{_label(group, point)} can't be imported: {type(exc).__name__}: {exc}") from exc
    problem = _class_problem(policy, interface)
    if problem:
        raise PluginError(f"{_label(group, point)} {problem}.")
    assert isinstance(policy, type)
    return policy


def create(group: str, name: str, *, kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Loads a policy and constructs it: kwargs come from the engine, options from the user's configuration.

    Raises PluginError as load_policy does, and for options that the constructor doesn't take or still needs, and
    for anything that the constructor raises.
    """
    policy = load_policy(group, name)
    label = _label(group, _find(group, name))
    problem = _options_problem(policy, kwargs, options)
    if problem:
        raise PluginError(f"{label} {problem}.")
    try:
        return policy(**kwargs, **options)
    except Exception as exc:
        raise PluginError(f"{label} can't be constructed: {type(exc).__name__}: {exc}") from exc


def create_drafter(name: str, options: Mapping[str, Any]) -> Drafter | None:
    """The drafter of that name; None for `none`. Raises PluginError as `create` does."""
    if name != NO_DRAFTER:
        drafter: Drafter = create(DRAFTERS, name, kwargs={}, options=options)
        return drafter
    if options:
        raise PluginError(f"drafter_options are set, but drafter is {NO_DRAFTER!r}: name a drafter, or take them out.")
    return None


def _interface(group: str) -> type[Any]:
    if group not in _INTERFACES:
        raise PluginError(f"there is no plugin group {group!r}; the groups are {', '.join(sorted(_INTERFACES))}.")
    return _INTERFACES[group]


def _origin(point: EntryPoint) -> tuple[str, str]:
    """Name and version of the distribution that an entry point comes from."""
    return (point.dist.name, point.dist.version) if point.dist is not None else ("unknown distribution", "?")


def _label(group: str, point: EntryPoint) -> str:
    distribution, version = _origin(point)
    return f"{group.removeprefix('mlx_quire.')} plugin {point.name!r} ({point.value}, from {distribution} {version})"


def _find(group: str, name: str) -> EntryPoint:
    """The one entry point of that name."""
    points = list(entry_points(group=group, name=name))
    if not points:
        known = installed(group)
        offer = ", ".join(f"{policy.name} ({policy.distribution} {policy.version})" for policy in known) or "nothing"
        hint = _nearest(name, [policy.name for policy in known])
        raise PluginError(f"no plugin {name!r} in {group}.{hint} Installed: {offer}.")
    if len(points) > 1:
        offers = ", ".join(sorted(" ".join(_origin(point)) + f" ({point.value})" for point in points))
        raise PluginError(f"{group} plugin {name!r} is offered more than once: {offers}. Uninstall all but one.")
    return points[0]


def _nearest(name: str, names: Iterable[str]) -> str:
    near = nearest_name(name, names)
    return f" Did you mean {near!r}?" if near else ""


def _class_problem(policy: Any, interface: type[Any]) -> str | None:
    """What is wrong with a class as an implementation of an interface, or None."""
    if not isinstance(policy, type):
        return f"is not a class but {policy!r}"
    is_abc = inspect.isabstract(interface)
    if is_abc and not issubclass(policy, interface):
        return f"is not a subclass of {interface.__name__}"
    version = getattr(policy, "interface_version", INTERFACE_VERSION)
    if version != INTERFACE_VERSION:
        return f"is written for interface version {version}; this is version {INTERFACE_VERSION}"
    members = {
        name: member
        for name, member in vars(interface).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    }
    missing = set(getattr(policy, "__abstractmethods__", ())) | {name for name in members if not hasattr(policy, name)}
    if missing:
        return f"does not implement {', '.join(sorted(missing))} of {interface.__name__}"
    for name, member in members.items():
        problem = _member_problem(name, member, inspect.getattr_static(policy, name))
        if problem:
            return problem
    return None


def _member_problem(name: str, expected: Any, actual: Any) -> str | None:
    """How a method or property differs from the interface's, or None."""
    if isinstance(expected, property):
        return f"has a method {name}, which must be a property" if inspect.isroutine(actual) else None
    if not callable(actual) and not isinstance(actual, staticmethod | classmethod):
        return f"has {name} = {actual!r}, which must be a method"
    if isinstance(actual, staticmethod | classmethod):
        return f"has {name} as a {type(actual).__name__}, which must be an ordinary method"
    wanted = list(inspect.signature(expected).parameters.values())[1:]
    theirs = list(inspect.signature(actual).parameters.values())[1:]
    if not _accepts(theirs, wanted):
        want = ", ".join(parameter.name for parameter in wanted)
        have = ", ".join(str(parameter) for parameter in theirs)
        return f"defines {name}({have}); its arguments must be ({want})"
    return None


def _accepts(theirs: list[inspect.Parameter], wanted: list[inspect.Parameter]) -> bool:
    """Whether a signature takes the wanted arguments, by position and by name, and needs no others."""
    positional = [parameter for parameter in theirs if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    catches_all = {parameter.kind for parameter in theirs} >= {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    }
    for index, parameter in enumerate(wanted):
        if index >= len(positional):
            return catches_all
        if positional[index].name != parameter.name:
            return False
        if parameter.default is not parameter.empty and positional[index].default is parameter.empty:
            return False
    extra = [parameter for parameter in theirs if parameter not in positional[: len(wanted)]]
    return not any(_is_required(parameter) for parameter in extra)


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not variadic


def _options_problem(policy: type[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
    """Why these arguments can't construct the policy, or None."""
    clash = sorted(set(kwargs) & set(options))
    if clash:
        return f"gets {', '.join(clash)} from the engine; take it out of the plugin's options"
    parameters = inspect.signature(policy).parameters
    catches_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {name for name, parameter in parameters.items() if parameter.kind is not parameter.POSITIONAL_ONLY}
    refused = [name for name in kwargs if name not in named]
    if refused and not catches_all:
        return f"must accept {', '.join(kwargs)} in its constructor, but doesn't take {', '.join(refused)}"
    choices = sorted(named - set(kwargs))
    for name in options:
        if name not in named and not catches_all:
            offer = f"Its options are: {', '.join(choices)}" if choices else "It has no options"
            return f"has no option {name!r}.{_nearest(name, choices)} {offer}"
    given = set(kwargs) | set(options)
    needed = [name for name, parameter in parameters.items() if _is_required(parameter) and name not in given]
    return f"needs the option {', '.join(needed)}" if needed else None
