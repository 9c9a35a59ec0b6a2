"""The experiments, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from loadtest.experiments.attention import Attention
from loadtest.experiments.base import Experiment
from loadtest.experiments.batching import Batching
from loadtest.experiments.chunking import Chunking
from loadtest.experiments.paging import Paging
from loadtest.experiments.preemption import Preemption
from loadtest.experiments.prefix import Prefix

EXPERIMENTS: Mapping[str, type[Experiment]] = MappingProxyType(
    {kind.name: kind for kind in (Batching, Paging, Attention, Prefix, Chunking, Preemption)}
)
ALL = "all"
