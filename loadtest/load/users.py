"""Locust users: one class for each scenario."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import gevent
from gevent.pool import Group
from locust import User, task
from locust.env import Environment

from loadtest.load import workloads
from loadtest.load.session import LoadSession
from loadtest.load.sse import BlockingClient
from loadtest.load.traces import to_call
from loadtest.load.workloads import Call, Conversation
from loadtest.stream import RequestResult

_COMPLETIONS = "/v1/completions"
_CHAT = "/v1/chat/completions"
_IDLE_S = 0.05
_AFTER_FAILURE_S = 0.5  # a server that refuses at once must not be asked a thousand times a second


def session_of(environment: Environment) -> LoadSession:
    """The environment's load session, which the init hook has put there."""
    session = environment.quire_session  # type: ignore[attr-defined]
    assert isinstance(session, LoadSession)
    return session


class StreamingUser(User):
    """Sends streamed completions and records when their parts come. Subclasses say what to ask."""

    abstract = True
    scenario: ClassVar[str]

    def on_start(self) -> None:
        """Locust calls this in the user's greenlet."""
        self.session = session_of(self.environment)
        self.options = self.session.checked_options
        self.worker, self.number = self.session.next_user()
        self.random = workloads.user_random(self.options.seed, self.worker, self.number)
        self.client = self.session.client()

    def on_stop(self) -> None:
        """Locust calls this when the user is stopped."""
        self.client.close()

    def ask(self, call: Call, client: BlockingClient | None = None) -> RequestResult:
        """Sends one request and records it, also when the user is stopped meanwhile."""
        client = client or self.client
        path, body = self._request(call, client)
        growing: list[RequestResult] = []

        def start(result: RequestResult) -> None:
            growing.append(result)
            self.session.open[id(result)] = result

        try:
            return client.stream(path, body, on_start=start)
        finally:
            for result in growing:
                del self.session.open[id(result)]
                self.session.record(call.tag, path, result)

    def _request(self, call: Call, client: BlockingClient) -> tuple[str, Mapping[str, Any]]:
        options = self.options
        body: dict[str, Any] = {
            "model": self.session.model,
            "max_tokens": call.max_tokens,
            "temperature": 0,
            **({"ignore_eos": True} if options.ignore_eos else {}),
            **options.extra_body,
        }
        if call.messages is not None:
            return _CHAT, {**body, "messages": list(call.messages)}
        if options.api == "chat":
            return _CHAT, {**body, "messages": [{"role": "user", "content": call.prompt}]}
        return _COMPLETIONS, {**body, "prompt": call.prompt}


class ClosedLoopUser(StreamingUser):
    """Sends its next request when its last one has ended."""

    abstract = True

    def on_start(self) -> None:
        """Begins the user's own stream of calls."""
        super().on_start()
        self.calls = self.workload()

    def workload(self) -> Iterator[Call]:
        """This user's calls, without end."""
        raise NotImplementedError

    @task
    def next_call(self) -> None:
        """One request."""
        if not self.ask(next(self.calls)).ok:
            gevent.sleep(_AFTER_FAILURE_S)


class ConcurrencySweep(ClosedLoopUser):
    """Prompts of one length that share nothing, at 1, 2, 4, … users."""

    scenario = "concurrency_sweep"

    def workload(self) -> Iterator[Call]:
        """See the class."""
        return workloads.uniform(self.random, self.options.input_tokens, self.options.output_tokens)


class SharedPrefix(ClosedLoopUser):
    """Chats with one of a few system prompts: what prefix caching is for."""

    scenario = "shared_prefix"

    def workload(self) -> Iterator[Call]:
        """See the class."""
        o = self.options
        return workloads.shared_prefix(
            self.random, o.seed, o.num_prefixes, o.prefix_tokens, o.input_tokens, o.output_tokens
        )


class MixedLengths(ClosedLoopUser):
    """Short and long prompts and answers together: what padding and static batches are bad at."""

    scenario = "mixed_lengths"

    def workload(self) -> Iterator[Call]:
        """See the class."""
        return workloads.mixed_lengths(self.random, self.options.mixed_inputs, self.options.mixed_outputs)


class LongPrefillIntruder(ClosedLoopUser):
    """Ordinary streams; the first user sends a long prompt every few seconds instead, which delays their tokens."""

    scenario = "long_prefill_intruder"

    def workload(self) -> Iterator[Call]:
        """See the class."""
        if self._is_intruder:
            return workloads.intruder(self.random, self.options.intruder_tokens)
        return (
            Call("victim", call.max_tokens, prompt=call.prompt)
            for call in workloads.uniform(self.random, self.options.input_tokens, self.options.output_tokens)
        )

    @property
    def _is_intruder(self) -> bool:
        return self.worker == 0 and self.number == 0

    @task
    def next_call(self) -> None:
        """One request; the intruder's after its pause."""
        if self._is_intruder:
            gevent.sleep(self.options.intruder_every)
        if not self.ask(next(self.calls)).ok:
            gevent.sleep(_AFTER_FAILURE_S)


class MultiTurnAgents(StreamingUser):
    """Conversations that grow by answers and tools' results: each turn's prompt begins with the last one's."""

    scenario = "multi_turn_agents"

    def on_start(self) -> None:
        """Begins the user's conversation."""
        super().on_start()
        o = self.options
        self.conversation = Conversation.start(
            self.random,
            turns=o.turns,
            prefix_tokens=o.prefix_tokens,
            input_tokens=o.input_tokens,
            tool_tokens=o.tool_tokens,
            output_tokens=o.output_tokens,
            seed=o.seed,
            tool_role=o.tool_role,
        )

    @task
    def next_turn(self) -> None:
        """One request of the conversation."""
        result = self.ask(self.conversation.next_call())
        if result.ok:
            self.conversation.take_answer("".join(result.texts))
        else:
            self.conversation.forget()
            gevent.sleep(_AFTER_FAILURE_S)


class OpenLoopUser(StreamingUser):
    """Sends requests when they are due, whether or not earlier ones have ended."""

    abstract = True

    def on_start(self) -> None:
        """Nothing is open yet."""
        super().on_start()
        self.open = Group()
        self._idle: list[BlockingClient] = []

    def on_stop(self) -> None:
        """Ends the open requests."""
        self.open.kill()
        for client in self._idle:
            client.close()
        super().on_stop()

    def send(self, call: Call) -> None:
        """Starts a request and returns at once."""
        self.open.spawn(self._send, call)

    def _send(self, call: Call) -> None:
        client = self._idle.pop() if self._idle else self.session.client()
        self.ask(call, client)
        self._idle.append(client)


class Poisson(OpenLoopUser):
    """Arrivals of a Poisson process, at one rate after the other."""

    scenario = "poisson"

    def on_start(self) -> None:
        """Begins at the rate that is set."""
        super().on_start()
        self.calls = workloads.uniform(self.random, self.options.input_tokens, self.options.output_tokens)
        self.rate, self.due = 0.0, 0.0

    @task
    def arrive(self) -> None:
        """Waits for the next arrival and sends it."""
        rate = self.session.rate
        if rate != self.rate:
            self.rate, self.due = rate, time.perf_counter()
        if not rate:
            gevent.sleep(_IDLE_S)
            return
        self.due += next(workloads.arrivals(self.random, rate))
        while (left := self.due - time.perf_counter()) > 0:
            # In short steps: the rate may change, and at a low rate the next arrival is far away.
            gevent.sleep(min(left, _IDLE_S))
            if self.session.rate != rate:
                return
        self.send(next(self.calls))


class TraceReplay(OpenLoopUser):
    """Replays a trace by its own times, prefixes included."""

    scenario = "trace_replay"

    @task
    def replay(self) -> None:
        """The whole trace, once."""
        options, (requests, size) = self.options, self.session.trace
        began = time.perf_counter()
        for request in requests:
            call = to_call(request, size, options.trace_scale)
            gevent.sleep(max(0.0, began + request.arrival_s / options.trace_speed - time.perf_counter()))
            self.send(call)
        self.open.join()
        self.session.trace_over = True
        gevent.sleep(random.random() + 3600)  # the shape ends the run within a second or two
