"""The ModelRunner that needs no model: a shadow of the KV pool, and tokens that follow from its content.

For each slot of the pool it keeps what a model's K/V depends on: the token, its position and all tokens before it. It
reads a sequence the way attention does, through the block table, and derives the next token from what it finds there.
So a block used after it was freed, shared wrongly or not recomputed gives other tokens than `reference_tokens`, and
with `verify` an IntegrityError at the step that reads it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlx_engine.errors import IntegrityError
from mlx_engine.types import SCRATCH_BLOCK, ModelRunnerOutput, ScheduledSequence, SchedulerOutput

# Seconds that a step takes on the device.
StepTime = Callable[[SchedulerOutput], float]
# What K/V depends on besides the tokens (a salt, an adapter), by request id.
Domain = Callable[[str], str]


class VirtualClock:
    """Seconds that pass only when told to. Call it for the time, as `time.monotonic`."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def advance_to(self, time: float) -> None:
        """Moves the clock on; a time in the past leaves it where it is."""
        self._now = max(self._now, time)


@dataclass(frozen=True, slots=True)
class LinearStepTime:
    """A step's seconds: a fixed part, and one for each token run and each token of context attended to."""

    fixed: float
    per_token: float = 0.0
    per_context_token: float = 0.0

    def __call__(self, output: SchedulerOutput) -> float:
        """The seconds of this step."""
        context = sum(seq.start + seq.num_tokens + len(seq.draft_token_ids) for seq in output.sequences)
        return self.fixed + self.per_token * output.num_tokens + self.per_context_token * context


def no_time(output: SchedulerOutput) -> float:
    """A StepTime for tests that don't care: steps take none."""
    del output
    return 0.0


def one_domain(request_id: str) -> str:
    """A Domain for when all requests share one: K/V depends on tokens only."""
    del request_id
    return ""


def reference_tokens(prompt: Sequence[int], count: int, vocab_size: int, domain: str = "") -> list[int]:
    """The first `count` tokens that a SimulatedRunner gives after `prompt`, from its definition and without a pool."""
    state = _root(domain)
    for token in prompt:
        state = _fold(state, token)
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(state % vocab_size)
        state = _fold(state, tokens[-1])
    return tokens


def _root(domain: str) -> int:
    return zlib.crc32(domain.encode())


def _fold(state: int, token: int) -> int:
    # The same in every process: Python's hash of integers has no random seed.
    return hash((state, token)) & 0x7FFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class _Slot:
    """The K/V of one token: what it was computed from."""

    token: int
    position: int
    state: int  # folded over all tokens up to this one, as they were read through the block table


class SimulatedStep:
    """A StepHandle: runs when launched, and is done `step_time` later on the clock."""

    def __init__(self, runner: SimulatedRunner, output: SchedulerOutput, tables: list[tuple[int, ...]]) -> None:
        self._runner = runner
        self._output = output
        self._tables = tables
        self._result: ModelRunnerOutput | None = None
        self._done = 0.0

    def launch(self) -> None:
        """See StepHandle. Raises IntegrityError if a step before it hasn't been waited for."""
        if self._result is not None:
            raise IntegrityError(f"step {self._output.step} is launched twice")
        self._result, self._done = self._runner.run(self._output, self._tables)

    def wait(self) -> ModelRunnerOutput:
        """See StepHandle. Moves the clock to the end of the step."""
        if self._result is None:
            raise IntegrityError(f"step {self._output.step} is waited for, but was never launched")
        self._runner.end(self._done)
        return self._result


class SimulatedRunner:
    """The ModelRunner that needs no model: a shadow of the KV pool, and tokens that follow from its content.

    With `verify`, each step reads every slot of each of its sequences and raises IntegrityError for one that does not
    hold what the sequence's tokens make it; without, it reads as little as it can, and wrong K/V shows in the tokens.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        clock: VirtualClock | None = None,
        step_time: StepTime = no_time,
        domain: Domain = one_domain,
        verify: bool = True,
    ) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._clock = clock or VirtualClock()
        self._step_time = step_time
        self._domain = domain
        self._verify = verify
        self._pool: dict[tuple[int, int], _Slot] = {}  # (block, offset) -> what was written there last
        self._last_samples: dict[str, int] = {}  # of the step launched last
        self._running = False
        self._steps = 0

    def execute_model(self, output: SchedulerOutput) -> SimulatedStep:
        """See ModelRunner. Copies the block tables now: they may grow before the step is launched."""
        return SimulatedStep(self, output, [tuple(seq.block_table) for seq in output.sequences])

    def dispatch_counts(self) -> Mapping[str, int]:
        """See ModelRunner: the steps run."""
        return {"simulated": self._steps}

    def run(self, output: SchedulerOutput, tables: Sequence[tuple[int, ...]]) -> tuple[ModelRunnerOutput, float]:
        """Runs a step: all writes first, then all reads, as a layer does. Returns its samples, and when it is done."""
        if self._running:
            raise IntegrityError(f"step {output.step} is launched while another one runs")
        self._running = True
        self._steps += 1
        written: set[tuple[int, int]] = set()
        for seq, table in zip(output.sequences, tables, strict=True):
            self._write(seq, table, written)
        samples = {}
        after_drafts = {}
        for seq, table in zip(output.sequences, tables, strict=True):
            states = self._read(seq, table)
            if seq.samples:
                samples[seq.request_id], *after = (state % self._vocab_size for state in states)
                if after:
                    after_drafts[seq.request_id] = after
        self._last_samples = samples
        return ModelRunnerOutput(output.step, samples, after_drafts), self._clock() + self._step_time(output)

    def end(self, time: float) -> None:
        """Ends the running step at this time."""
        self._running = False
        self._clock.advance_to(time)

    def _write(self, seq: ScheduledSequence, table: tuple[int, ...], written: set[tuple[int, int]]) -> None:
        tokens = seq.token_ids
        if not tokens and seq.num_tokens == 1:
            if seq.request_id not in self._last_samples:
                raise IntegrityError(f"{seq.request_id} awaits a token that the step before did not sample")
            tokens = (self._last_samples[seq.request_id],)
        if len(tokens) != seq.num_tokens:
            raise IntegrityError(f"{seq.request_id} runs {seq.num_tokens} tokens, but brings {len(tokens)}")
        if seq.draft_token_ids and not (seq.samples and seq.num_tokens == 1):
            raise IntegrityError(f"{seq.request_id} brings drafts without a lone token that samples before them")
        state = self._state_before(seq, table)
        for position, token in enumerate((*tokens, *seq.draft_token_ids), seq.start):
            where = self._where(seq, table, position)
            if where in written:
                raise IntegrityError(f"two sequences write slot {where} in one step, one of them {seq.request_id}")
            if not 0 <= token < self._vocab_size:
                raise IntegrityError(f"{seq.request_id} runs token {token} of a vocabulary of {self._vocab_size}")
            written.add(where)
            state = _fold(state, token)
            self._pool[where] = _Slot(token, position, state)

    def _state_before(self, seq: ScheduledSequence, table: tuple[int, ...]) -> int:
        if seq.start == 0:
            return _root(self._domain(seq.request_id))
        slot = self._pool.get(self._where(seq, table, seq.start - 1))
        return slot.state if slot is not None else -1

    def _read(self, seq: ScheduledSequence, table: tuple[int, ...]) -> list[int]:
        """The states after the last token and after each draft."""
        last = seq.start + seq.num_tokens - 1
        end = last + 1 + len(seq.draft_token_ids)
        if self._verify:
            state = _root(self._domain(seq.request_id))
            for position in range(end):
                where = self._where(seq, table, position)
                slot = self._pool.get(where)
                state = _fold(state, slot.token if slot is not None else -1)
                if slot is None or (slot.position, slot.state) != (position, state):
                    raise IntegrityError(
                        f"step reads slot {where} as token {position} of {seq.request_id}, but it holds {slot}"
                    )
        return [self._pool[self._where(seq, table, position)].state for position in range(last, end)]

    def _where(self, seq: ScheduledSequence, table: tuple[int, ...], position: int) -> tuple[int, int]:
        index, offset = divmod(position, self._block_size)
        if index >= len(table) or not SCRATCH_BLOCK < table[index] <= self._num_blocks:
            raise IntegrityError(f"the block table {table} of {seq.request_id} has no block for token {position}")
        return table[index], offset
