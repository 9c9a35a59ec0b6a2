"""An engine over simulated K/V, and a client that knows each request's answer beforehand and checks every output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlx_engine.config import EngineConfig
from mlx_engine.interfaces import SchedulerPolicy
from mlx_engine.types import FinishReason, Request, RequestOutput, SamplingParams, SchedulerOutput
from plugins.simulator import build_simulated_engine, reference_tokens
from tests.mlx_engine.drafters import make_drafter

VOCAB = 60
EOS = 7


@dataclass(slots=True)
class Expected:
    """One request's right answer, and what has come of it."""

    request: Request
    tokens: list[int]  # that the client is to get
    num_sampled: int  # with the end-of-sequence or stop token
    reason: FinishReason
    got: list[int] = field(default_factory=list)
    last: RequestOutput | None = None

    @property
    def finished(self) -> bool:
        return self.last is not None and self.last.finish_reason is not None


class Client:
    """Adds, steps and aborts; raises AssertionError at the first answer that is not the reference's."""

    def __init__(
        self, config: EngineConfig, policy: SchedulerPolicy | None = None, drafter: str = "none", seed: int = 0
    ) -> None:
        self.config = config
        self.domains: dict[str, str] = {}
        self.simulated = build_simulated_engine(
            config,
            vocab_size=VOCAB,
            eos_token_ids=frozenset({EOS}),
            step_time=self._within_limits,
            domain=lambda request_id: self.domains[request_id],
            policy=policy,
            drafter=make_drafter(drafter, VOCAB, lambda request_id: self.domains[request_id], seed),
        )
        self.engine = self.simulated.engine
        self.limit = self.engine.info.max_tokens_per_request
        self.open: dict[str, Expected] = {}
        self.done: list[Expected] = []
        self.aborted: list[Expected] = []
        self.seen: list[tuple[str, list[int]]] = []  # domain and all tokens of every request, whatever became of it

    def add(self, request_id: str, prompt: list[int], **options: Any) -> Expected:
        """Adds a request; its sampling options are keyword arguments, as are `salt` and `priority`."""
        salt, priority = options.pop("salt", None), options.pop("priority", 0)
        sampling = SamplingParams(temperature=0.0, **options)
        request = Request(request_id, tuple(prompt), sampling, priority=priority, cache_salt=salt)
        expected = self._expect(request)
        self.engine.add_request(request)
        self.domains[request_id] = salt or ""
        self.open[request_id] = expected
        return expected

    def abort(self, request_id: str) -> None:
        """Ends an open request early."""
        assert self.engine.abort_request(request_id)
        self.aborted.append(self.open.pop(request_id))

    def step(self) -> list[RequestOutput]:
        """One engine step: every output must continue its request's answer, and the books must balance."""
        clock = self.simulated.clock
        clock.advance_to(clock() + 0.01)
        outputs = self.engine.step()
        for output in outputs:
            self._check(output)
        self.engine.check_idle()
        return outputs

    def expect_tokens(self, prompt: list[int], count: int) -> list[int]:
        """What follows a prompt, end-of-sequence tokens or not."""
        return reference_tokens(prompt, count, VOCAB)

    def finish(self) -> None:
        """Steps until nothing is left: everyone has the whole answer, every block is back, and the counts add up."""
        self.finish_open()
        self._check_idle()

    def finish_open(self) -> None:
        """Steps until nothing is left and everyone has the whole answer. Leaves the prefix cache as it is."""
        todo = [e for e in self.open.values() if not e.finished]
        # Each step moves a token; recomputing what preemption took may multiply that.
        steps = 100 + 20 * sum(len(e.request.prompt_token_ids) + e.num_sampled for e in todo)
        while self.engine.has_unfinished_requests():
            assert steps > 0, f"requests hang: {sorted(self.open)}"
            self.step()
            steps -= 1
        assert not self.open, f"never finished: {sorted(self.open)}"

    def _within_limits(self, output: SchedulerOutput) -> float:
        """A step takes no time, and holds no more tokens than it may; nothing runs what no answer can reach."""
        assert output.num_tokens <= self.config.max_num_batched_tokens, f"{output.num_tokens} tokens in a step"
        for seq in output.sequences:
            request = self.open[seq.request_id].request
            longest = min(len(request.prompt_token_ids) + request.sampling.max_tokens, self.limit)
            end = seq.start + seq.num_tokens + len(seq.draft_token_ids)
            # The last token of an answer is never run.
            assert end < longest, f"{seq.request_id} runs {end} tokens of {longest}"
        return 0.0

    def _expect(self, request: Request) -> Expected:
        prompt, sampling = request.prompt_token_ids, request.sampling
        count = min(sampling.max_tokens, self.limit - len(prompt))
        tokens = reference_tokens(prompt, max(count, 0), VOCAB, request.cache_salt or "")
        stops = {*sampling.stop_token_ids, *([] if sampling.ignore_eos else [EOS])}
        self.seen.append((request.cache_salt or "", [*prompt, *tokens]))
        for index, token in enumerate(tokens):
            if token in stops:
                return Expected(request, tokens[:index], index + 1, FinishReason.STOP)
        return Expected(request, tokens, len(tokens), FinishReason.LENGTH)

    def _check(self, output: RequestOutput) -> None:
        name = output.request_id
        assert name in self.open, f"an output for {name}, which has ended or never was"
        expected = self.open[name]
        expected.got += output.new_token_ids
        expected.last = output
        assert expected.got == expected.tokens[: len(expected.got)], f"{name} got {expected.got}: {expected.tokens}"
        assert output.num_prompt_tokens == len(expected.request.prompt_token_ids)
        assert output.num_cached_tokens <= self._most_cached(expected.request), f"{name} hit what nobody computed"
        if output.finish_reason is not None:
            assert output.finish_reason is expected.reason, f"{name} ended with {output.finish_reason}"
            assert expected.got == expected.tokens, f"{name} got {expected.got}, not {expected.tokens}"
            assert output.num_output_tokens == expected.num_sampled
            self.done.append(self.open.pop(name))

    def _most_cached(self, request: Request) -> int:
        """Whole blocks shared with any request of the same salt, itself left out, and one token left to compute."""
        prompt, block = list(request.prompt_token_ids), self.config.block_size
        own = (request.cache_salt or "", [*prompt, *self.open[request.request_id].tokens])
        others = [tokens for domain, tokens in self.seen if domain == (request.cache_salt or "")]
        if self.seen.count(own) < 2 and own[1] in others:
            others.remove(own[1])
        most = max((_common(prompt, tokens) for tokens in others), default=0)
        return min(most, len(prompt) - 1) // block * block

    def _check_idle(self) -> None:
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_finished == len(self.done)
        assert stats.num_aborted == len(self.aborted)
        partly = sum(e.last.num_output_tokens for e in self.aborted if e.last is not None)
        assert stats.generation_tokens == sum(e.num_sampled for e in self.done) + partly
        assert stats.kv.private == 0, "private blocks are left over"
        assert stats.kv.evictable == stats.kv.cached, "cached blocks are pinned by nobody"
        self.simulated.kv.reset_prefix_cache()
        self.engine.check_idle()
        assert self.engine.stats().kv.free == self.config.num_blocks, "blocks are lost"


def _common(a: list[int], b: list[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
