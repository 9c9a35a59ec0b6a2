"""The data that crosses the engine's seams: frozen, slotted, and free of arrays.

Units: token counts are tokens, times are seconds of `time.monotonic()`, sizes say bytes in their name.

What is made anew for every row of every step is a `Row`, everything else a dataclass.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from mlx_engine.errors import RequestError

# Block 0 of every pool is scratch: padding points at it, and it is never handed out or counted.
SCRATCH_BLOCK = 0


class Row(msgspec.Struct, frozen=True, gc=False):
    """A base for frozen records that a step makes one of for each of its rows.

    Made in 0.1 us, where a frozen dataclass of ten fields takes 1.2, and never visited by the garbage collector: a Row
    must hold nothing that leads back to it. `msgspec.structs` has what `dataclasses` has for dataclasses.
    """


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end-of-sequence or a stop token
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # the client left
    ERROR = "error"  # the engine failed


def _check_range(name: str, value: float, low: float, high: float) -> None:
    # `not low <= x <= high` also refuses NaN.
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low:g} and {high:g}, not {value}.", param=name)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen. Raises RequestError for values out of range."""

    max_tokens: int = 16
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k most likely tokens; 0 or -1 is off
    top_p: float = 1.0  # keep the smallest set whose probability reaches top_p; 1 is off
    min_p: float = 0.0  # keep tokens at least min_p times as likely as the best; 0 is off
    seed: int | None = None  # same seed, same tokens, whatever else is in the batch
    stop_token_ids: tuple[int, ...] = ()  # beside the model's end-of-sequence tokens
    ignore_eos: bool = False  # go on past end-of-sequence tokens

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, not {self.max_tokens}.", param="max_tokens")
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if self.top_k < -1:
            raise RequestError(f"top_k must be -1 or 0 (off) or positive, not {self.top_k}.", param="top_k")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What must be equal, besides the tokens, for two sequences to share K/V."""

    model: str
    adapter: str | None = None
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate."""

    request_id: str  # unique among the engine's unfinished requests
    prompt_token_ids: tuple[int, ...]  # at least one
    sampling: SamplingParams
    priority: int = 0  # lower runs sooner; only the `priority` scheduler looks at it
    cache_salt: str | None = None  # requests share cached K/V only within one salt
    arrival_time: float | None = None  # the engine's clock when it was added, if None


class RequestOutput(Row, frozen=True):
    """What one engine step produced for one request."""

    request_id: str
    new_token_ids: tuple[int, ...]  # without the end-of-sequence or stop token
    finish_reason: FinishReason | None  # None while it goes on
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens whose K/V came from the prefix cache at first admission
    num_output_tokens: int  # so far, the end-of-sequence token included
    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    num_preemptions: int = 0
    error: str | None = None


class RequestView(Row, frozen=True):
    """One request as a policy sees it."""

    request_id: str
    arrival_time: float
    priority: int
    num_prompt_tokens: int
    num_tokens: int  # prompt and output, counting a sampled token that is still on the device
    num_computed_tokens: int  # tokens whose K/V is in the pool, counting the step in flight
    num_output_tokens: int
    max_tokens: int
    num_preemptions: int
    last_scheduled_time: float | None

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that still need a forward pass. Exactly 1 while decoding."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether its next step is one token long and yields a token."""
        return self.num_output_tokens > 0 and self.num_tokens - self.num_computed_tokens == 1


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """What a SchedulerPolicy may look at: one frozen picture of the engine, taken before a step."""

    now: float
    step: int
    waiting: tuple[RequestView, ...]  # in order of arrival in the queue; preempted ones come first
    running: tuple[RequestView, ...]  # in order of admission; each holds blocks
    token_budget: int  # tokens one step may process
    max_num_seqs: int  # requests that may run at once
    num_free_blocks: int  # free, or cached and evictable
    num_blocks: int
    block_size: int

    def get(self, request_id: str) -> RequestView | None:
        """The view of one request, running or waiting, or None."""
        for view in (*self.running, *self.waiting):
            if view.request_id == request_id:
                return view
        return None

    def is_running(self, request_id: str) -> bool:
        """Whether the request holds blocks now."""
        return any(view.request_id == request_id for view in self.running)


class ScheduledRequest(Row, frozen=True):
    """A policy's proposal: run up to num_tokens tokens of this request in the step.

    The Scheduler clamps it to what the request needs and to what is left of the budget, so a policy may
    propose more than fits: order is what matters.
    """

    request_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A cached prefix: whole blocks, at most `num_tokens - 1` tokens of the sequence it was matched for."""

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KVCacheUsage:
    """Where the pool's blocks are. free + private + cached == num_blocks (scratch is not counted)."""

    num_blocks: int
    block_size: int
    free: int
    private: int  # held by one request, not shared
    cached: int  # owned by the prefix cache, in use or not
    evictable: int  # cached and used by no running request
    internal_fragmentation: float  # share of the slots held by requests that no token fills, 0 to 1
    external_fragmentation: float  # share of the free blocks outside the largest run of free ids, 0 to 1


class ScheduledSequence(Row, frozen=True):
    """One sequence's part of a step: `num_tokens` tokens from position `start` on."""

    request_id: str
    start: int  # position of the first token, = num_computed_tokens before the step
    num_tokens: int
    # The tokens, len num_tokens. Empty when the one token is the last step's sample, still on the device.
    token_ids: Sequence[int]
    block_table: Sequence[int]  # covers at least start + num_tokens slots, and those of the drafts
    samples: bool  # whether the last token's logits give a new token
    num_output_tokens: int  # before this step's sample: the position of the sample in the seeded stream
    sampling: SamplingParams
    seed: int  # the request's, or one that the engine drew for it
    # Guesses of what follows, to run as well: after a lone token that samples only. Each gives a sample too.
    draft_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step, decided: everything that the ModelRunner needs."""

    step: int
    sequences: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens in the step's forward pass."""
        return sum(seq.num_tokens + len(seq.draft_token_ids) for seq in self.sequences)


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The sampled token of each sequence of the step that samples."""

    step: int
    sampled_token_ids: Mapping[str, int] = field(default_factory=dict)
    # Of sequences with drafts, what is sampled after each draft: worth something as far as the drafts were right.
    after_drafts: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LayerKVSpec:
    """The K/V that one attention layer stores per token."""

    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int
    sliding_window: int | None = None  # tokens a query sees, itself included; None is all


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What was built: fixed from start-up on."""

    model_name: str
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_tokens_per_request: int  # the context length, or what the pool holds if that is less
    num_blocks: int
    block_size: int
    device: str
    dtype: str
    kv_dtype: str  # of K/V in the pool
    policies: Mapping[str, str] = field(default_factory=dict)  # seam to plugin name
    linear_backend: str = "mlx"  # what linear layers run on: "native", "blas" or, on a GPU, "mlx"


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and gauges of the engine, for metrics, /health and tests. Counters only grow."""

    steps: int
    num_running: int
    num_waiting: int
    kv: KVCacheUsage
    num_preemptions: int
    num_finished: int
    num_aborted: int
    prompt_tokens: int  # of the admitted requests
    prefix_hit_tokens: int  # of those, taken from the prefix cache
    prefill_tokens: int  # tokens run through prefill chunks
    generation_tokens: int  # tokens sampled and kept
    wasted_tokens: int  # sampled one step after the end, dropped
    rejected_proposals: int  # proposals of the scheduler policy or the drafter that made no sense
    stalled_steps: int  # steps in which the policy named nothing though nothing else could move
    # Calls of a layer's attention by path; of compiled and recorded steps, steps.
    dispatch: Mapping[str, int] = field(default_factory=dict)
    draft_tokens: int = 0  # guessed by the drafter and run
    accepted_draft_tokens: int = 0  # of those, right and kept


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b for non-negative integers."""
    return -(-a // b)
