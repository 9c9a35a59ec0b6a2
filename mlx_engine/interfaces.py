"""The engine's seams. A policy is one class behind one of these; see CONTRIBUTING.md.

Arrays live behind ModelRunner and AttentionBackend only, and every method here is called on the one engine thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from mlx_engine.types import (
    CacheKey,
    KVCacheUsage,
    LayerKVSpec,
    ModelRunnerOutput,
    PrefixMatch,
    RequestView,
    ScheduledRequest,
    SchedulerOutput,
    SchedulerView,
)

if TYPE_CHECKING:
    from mlx_engine.input_batch import InputBatch

# Raised by one whenever a seam changes in a way that breaks plugins written for the one before.
INTERFACE_VERSION = 1


class SchedulerPolicy(ABC):
    """Which request runs, and how many tokens of it. Proposes over frozen views; the Scheduler disposes."""

    interface_version: ClassVar[int] = INTERFACE_VERSION

    @abstractmethod
    def schedule(self, view: SchedulerView) -> Sequence[ScheduledRequest]:
        """The step's requests, most urgent first. Must not keep or change the view.

        Proposals beyond the budget or `max_num_seqs` are cut off in order; unknown or repeated ids and
        non-positive counts are dropped and counted.
        """

    @abstractmethod
    def select_victim(self, view: SchedulerView, request_id: str) -> str | None:
        """The running request to preempt so that `request_id` gets blocks, or None to let it wait.

        Called when an allocation fails; `request_id` may be waiting or running, and may itself be the
        answer when it runs. The view is of this moment: requests preempted in this step are in `waiting`.
        """

    def on_request_finished(self, request: RequestView) -> None:  # noqa: B027
        """Told once for each request that ends, however it ends."""


class KVCacheManager(ABC):
    """Who holds which blocks. Knows nothing of arrays: a block is an id from 1 to num_blocks.

    Built as `cls(num_blocks=..., block_size=..., prefix_cache=..., max_model_len=..., **options)`.
    """

    interface_version: ClassVar[int] = INTERFACE_VERSION

    @abstractmethod
    def get_computed_blocks(self, request_id: str, token_ids: Sequence[int], key: CacheKey) -> PrefixMatch:
        """The longest cached prefix of token_ids, at most len(token_ids) - 1 tokens. Changes nothing."""

    @abstractmethod
    def allocate_slots(self, request_id: str, num_tokens: int, match: PrefixMatch | None = None) -> bool:
        """Makes the request's block table cover num_tokens tokens in all; False if blocks are short.

        All or nothing. `match` is given on the first call for a request only: its blocks become the head
        of the table and stay until `free`. Evicts unused cached blocks as needed.
        """

    @abstractmethod
    def block_table(self, request_id: str) -> Sequence[int]:
        """The request's block ids in order. The caller copies what it keeps."""

    @abstractmethod
    def cache_blocks(self, request_id: str, token_ids: Sequence[int], key: CacheKey) -> None:
        """Offers the whole blocks of token_ids, whose K/V has been computed, to the prefix cache."""

    @abstractmethod
    def free(self, request_id: str) -> None:
        """Takes the request's blocks back. Cached ones stay cached. Unknown ids are ignored."""

    @abstractmethod
    def reset_prefix_cache(self) -> int:
        """Forgets every cached block that no request uses; returns how many."""

    @property
    @abstractmethod
    def num_free_blocks(self) -> int:
        """Blocks that an allocation could get now: free ones and evictable ones."""

    @property
    @abstractmethod
    def max_tokens_per_request(self) -> int:
        """Tokens that one request could hold if it were alone in the pool."""

    @abstractmethod
    def usage(self) -> KVCacheUsage:
        """Where the blocks are now."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises IntegrityError unless every block is free, private or cached, exactly once."""


class PrefixCache(ABC):
    """Which token prefixes have K/V in the pool. Owns the blocks that it adopts.

    A *holder* (a request id) pins one path from the root: every block of its prefix. A block is evictable
    when no holder pins it; leaves go first, least recently used first.
    Built as `cls(block_size=..., **options)`.
    """

    interface_version: ClassVar[int] = INTERFACE_VERSION

    @abstractmethod
    def match_prefix(self, key: CacheKey, token_ids: Sequence[int]) -> PrefixMatch:
        """The longest cached prefix in whole blocks, at most len(token_ids) - 1 tokens. Pure."""

    @abstractmethod
    def acquire(self, holder: str, key: CacheKey, token_ids: Sequence[int], match: PrefixMatch) -> None:
        """Pins the matched blocks for a holder that pins nothing yet. Must follow match_prefix directly."""

    @abstractmethod
    def release(self, holder: str) -> None:
        """Unpins all that the holder pins, and marks it as used now. Unknown holders are ignored."""

    @abstractmethod
    def insert_prefix(
        self, holder: str, key: CacheKey, token_ids: Sequence[int], block_ids: Sequence[int]
    ) -> tuple[int, ...]:
        """Adds the whole blocks of token_ids, stored in block_ids, and pins the path for the holder.

        Returns the block ids that the cache adopted: it owns them from now on. A block whose prefix is
        cached already, in another block, is not adopted and stays the caller's.
        """

    @abstractmethod
    def evict(self, num_blocks: int) -> tuple[int, ...]:
        """Gives up to num_blocks evictable blocks back to the caller, least recently used leaves first."""

    @abstractmethod
    def reset(self) -> tuple[int, ...]:
        """Gives every evictable block back to the caller."""

    @abstractmethod
    def cached_block_ids(self) -> frozenset[int]:
        """Every block that the cache owns, for integrity checks."""

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Blocks that the cache owns."""

    @property
    @abstractmethod
    def num_evictable_blocks(self) -> int:
        """Blocks that evict() could give back, counting leaves and what they uncover."""

    def check_integrity(self) -> None:  # noqa: B027
        """Raises IntegrityError if the cache's own bookkeeping disagrees with itself. Optional; may be slow."""


class Drafter(ABC):
    """Guesses how a request goes on, so that one step can check several tokens. A wrong guess costs a row, no more.

    Asked for greedy requests only: a guess is kept where it is what the model itself would have chosen.
    Built as `cls(**options)`.
    """

    interface_version: ClassVar[int] = INTERFACE_VERSION

    @abstractmethod
    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int, num_pending: int) -> Sequence[int]:
        """At most max_tokens (1 or more) token ids that may follow token_ids; none where there is no idea.

        token_ids are all that is known of the request, prompt first: they only grow from call to call, by any number,
        and show what became of the last guess. Must not keep or change them. The first num_pending (0 or more) tokens
        of a guess are sampled already but not known yet: they are not checked, what follows them is. Called in a
        step's way, so it must be quick. A guess that is too long, or no list of token ids of the model's, is dropped
        as a whole and counted, and so is one that raises.
        """

    def on_request_finished(self, request_id: str) -> None:  # noqa: B027
        """Told once for each request that ends, asked about or not: what is kept of it can go."""


class LayerKVView(Protocol):
    """One layer's K/V for one step: what an mlx-lm model is given as that layer's `cache`.

    Has no `bits` and no `__len__`: mlx-lm reads meaning into both.
    """

    offset: Any  # mx.array [T] int32: position of each row's token, for rotary embeddings

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """A token for the mask, handed back to `attend`; carries the window."""

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Writes keys and values [T, num_kv_heads, 1, head_dim] to the pool; returns them unchanged."""

    def attend(self, queries: Any, *, scale: float, mask: Any, sinks: Any | None) -> Any:
        """Attention of queries [T, num_heads, 1, head_dim] over each row's sequence, same shape back."""


@runtime_checkable
class AttentionBackend(Protocol):
    """How K/V is stored on the device and read by attention."""

    def initialize(
        self, layers: Sequence[LayerKVSpec], num_blocks: int, block_size: int, dtype: Any, kv_dtype: Any = None
    ) -> None:
        """Allocates the pool: num_blocks blocks and the scratch block for each layer.

        dtype is the type of queries, keys and values, kv_dtype that of the pool's numbers: dtype if None, or int8.
        """

    def begin_step(self, batch: InputBatch) -> list[LayerKVView]:
        """The step's caches, one a layer. The views die with the step."""

    def state(self) -> list[Any]:
        """The pool's arrays, to evaluate with the step's outputs."""

    def dispatch_counts(self) -> Mapping[str, int]:
        """How often each path ran, by name."""


class StepHandle(Protocol):
    """A step that was built but may not have started."""

    def launch(self) -> None:
        """Hands the step to the device. Called once, after the step before has been waited for.

        Pools are updated in place only when no running step holds them, so a step is built while the one
        before runs and launched as soon as that one is done.
        """

    def wait(self) -> ModelRunnerOutput:
        """Blocks until the step's samples are on the host. Called once, on the engine thread."""


class ModelRunner(Protocol):
    """Runs one forward pass and samples."""

    def execute_model(self, output: SchedulerOutput) -> StepHandle:
        """Builds the step and returns at once. Decode tokens that are not on the host yet (empty `token_ids`)
        are the samples of the step built just before, taken on the device."""

    def dispatch_counts(self) -> Mapping[str, int]:
        """How often each attention path ran, by name."""
