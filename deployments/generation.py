"""One prompt's generation as text: the engine's tokens in, deltas out, with stop strings and usage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from deployments.engine_api import EngineClient, ServedModel
from deployments.metrics import SequenceMetrics
from mlx_engine.types import FinishReason, Request, RequestOutput


@dataclass(frozen=True, slots=True)
class Delta:
    """What came next of one sequence."""

    index: int  # the sequence's place in the response
    text: str  # may be empty
    finish_reason: str | None  # None while it goes on


class TextSequence:
    """A request that the engine works on, read as text. Must be closed, however it ends.

    `num_prompt_tokens`, `num_cached_tokens` and `num_output_tokens` hold what is known so far.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        engine: EngineClient,
        model: ServedModel,
        stop: Sequence[str],
        metrics: SequenceMetrics,
    ) -> None:
        """Hands the request to the engine. Raises EngineDeadError if there is none to take it."""
        self.index = index
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self._detokenizer = model.text.detokenizer(stop)
        self._has_stop = bool(stop)
        self._metrics = metrics
        self._reason: str | None = None
        self._failed = False
        self._closed = False
        self._stream = engine.generate(request)

    async def next(self) -> Delta | None:
        """The next delta; None after the one with a finish_reason.

        Raises RequestError if the engine refused the request, EngineDeadError if it died.
        """
        if self._reason is not None:
            return None
        try:
            output = await anext(self._stream)
        except StopAsyncIteration:  # closed meanwhile
            return None
        except Exception:
            self._failed = True
            raise
        self.num_cached_tokens = output.num_cached_tokens
        self._metrics.tokens(len(output.new_token_ids), output.first_token_time)
        text = self._take(output)
        if self._reason is not None:
            self.close()
        return Delta(self.index, text, self._reason)

    def _take(self, output: RequestOutput) -> str:
        text = self._push(output)
        if self._reason is None and output.finish_reason is not None:
            text += self._detokenizer.finish()
            self.num_output_tokens = output.num_output_tokens
            # The end of the text may have completed a stop string.
            stopped = self._detokenizer.stopped
            self._reason = FinishReason.STOP.value if stopped else output.finish_reason.value
        return text

    def _push(self, output: RequestOutput) -> str:
        if not self._has_stop:
            self.num_output_tokens = output.num_output_tokens
            return self._detokenizer.push(output.new_token_ids)
        # One by one, so that usage counts the same tokens however steps were merged on the way here.
        text = ""
        for token_id in output.new_token_ids:
            text += self._detokenizer.push((token_id,))
            self.num_output_tokens += 1
            if self._detokenizer.stopped:
                self._reason = FinishReason.STOP.value
                break
        return text

    def close(self) -> None:
        """Ends it: a request that the engine still works on is aborted."""
        if not self._closed:
            self._closed = True
            self._stream.close()
            self._metrics.ended(self._reason or ("error" if self._failed else "abort"))


class EmptySequence:
    """Stands for a prompt that nothing is generated for (max_tokens 0)."""

    def __init__(self, index: int, num_prompt_tokens: int) -> None:
        self.index = index
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self._ended = False

    async def next(self) -> Delta | None:
        """One delta, which ends it."""
        if self._ended:
            return None
        self._ended = True
        return Delta(self.index, "", FinishReason.LENGTH.value)

    def close(self) -> None:
        """Nothing to end."""


AnySequence = TextSequence | EmptySequence


async def merged(sequences: Sequence[AnySequence]) -> AsyncGenerator[Delta, None]:
    """The deltas of all sequences, as they come. Raises the first error of any. Close it with `aclosing`."""
    if len(sequences) == 1:
        while (delta := await sequences[0].next()) is not None:
            yield delta
        return
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()
    pumps = [asyncio.ensure_future(_pump(sequence, queue)) for sequence in sequences]
    try:
        num_open = len(pumps)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()


async def _pump(sequence: AnySequence, queue: asyncio.Queue[Delta | Exception | None]) -> None:
    try:
        while (delta := await sequence.next()) is not None:
            queue.put_nowait(delta)
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)
