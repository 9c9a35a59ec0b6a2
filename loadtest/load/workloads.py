"""What the scenarios ask: text for each request, from a seed. Nothing here sends anything.

Every user has a stream of calls of its own, so that what one is asked does not depend on how fast others are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.load.words import filler

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One request to make: a prompt or messages, not both."""

    tag: str  # which of the scenario's kinds it is; results are also given by tag
    max_tokens: int
    prompt: str | None = None
    messages: Sequence[Message] | None = None


def user_random(seed: int, *who: int) -> random.Random:
    """The randomness of one user of a run: the same for the same numbers, on every machine."""
    return random.Random("/".join(str(number) for number in (seed, *who)))


def uniform(randomness: random.Random, input_tokens: int, output_tokens: int) -> Iterator[Call]:
    """Prompts of one length that have no beginning in common."""
    while True:
        yield Call("uniform", output_tokens, prompt=filler(randomness, input_tokens))


def shared_prefix(
    randomness: random.Random, seed: int, num_prefixes: int, prefix_tokens: int, input_tokens: int, output_tokens: int
) -> Iterator[Call]:
    """Chats whose system prompt is one of a few that all users share (by `seed`), each with a question of its own."""
    systems = [filler(user_random(seed, -1, index), prefix_tokens) for index in range(num_prefixes)]
    while True:
        which = randomness.randrange(num_prefixes)
        messages = [
            {"role": "system", "content": systems[which]},
            {"role": "user", "content": filler(randomness, input_tokens)},
        ]
        yield Call("shared prefix", output_tokens, messages=messages)


def mixed_lengths(randomness: random.Random, inputs: Sequence[int], outputs: Sequence[int]) -> Iterator[Call]:
    """Every pair of lengths equally often, in random order."""
    while True:
        pairs = [(num_input, num_output) for num_input in inputs for num_output in outputs]
        randomness.shuffle(pairs)
        for num_input, num_output in pairs:
            yield Call(f"{num_input} in {num_output} out", num_output, prompt=filler(randomness, num_input))


def intruder(randomness: random.Random, input_tokens: int) -> Iterator[Call]:
    """Long prompts with short answers: what delays everybody else's next token."""
    while True:
        yield Call("intruder", 4, prompt=filler(randomness, input_tokens))


@dataclass(slots=True)
class Conversation:
    """One agent's chat, growing by the model's answers and by results of tools."""

    randomness: random.Random
    turns: int  # requests before the agent begins anew
    prefix_tokens: int  # of the system prompt that all agents have in common
    input_tokens: int
    tool_tokens: int  # of each tool result
    output_tokens: int
    seed: int
    tool_role: str  # the role that carries tool results: "tool", or "user" where a chat template knows no tools
    messages: list[dict[str, Any]]
    turn: int = 0

    @classmethod
    def start(cls, randomness: random.Random, **options: Any) -> Conversation:
        """A conversation before its first turn."""
        return cls(randomness, messages=[], **options)

    def next_call(self) -> Call:
        """The next turn's request."""
        if self.turn == self.turns:
            self.turn = 0
        if self.turn == 0:
            system = filler(user_random(self.seed, -1), self.prefix_tokens)
            question = filler(self.randomness, self.input_tokens)
            self.messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        self.turn += 1
        return Call(f"turn {self.turn:02}", self.output_tokens, messages=list(self.messages))

    def take_answer(self, text: str) -> None:
        """The model's answer to the last call, after which a tool's result follows."""
        result = filler(self.randomness, self.tool_tokens)
        if self.tool_role != "tool":
            self.messages += [{"role": "assistant", "content": text}, {"role": self.tool_role, "content": result}]
            return
        call_id = f"call_{self.turn}"
        function = {"name": "lookup", "arguments": f'{{"turn": {self.turn}}}'}
        self.messages += [
            {
                "role": "assistant",
                "content": text,
                "tool_calls": [{"id": call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call_id, "content": result},
        ]

    def forget(self) -> None:
        """Begins anew with the next call: an answer was lost."""
        self.turn = 0


def arrivals(randomness: random.Random, rate: float) -> Iterator[float]:
    """Seconds between the arrivals of a Poisson process of `rate` per second, which must be above 0."""
    while True:
        yield randomness.expovariate(rate)
