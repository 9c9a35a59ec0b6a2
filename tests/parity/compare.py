"""What "the same output" means: equal greedy token ids, near ties forgiven and counted. Nothing else forgives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Where the reference's two best log probabilities are closer than this, rounding may choose the other one.
NEAR_TIE = 0.02


@dataclass(frozen=True, slots=True)
class Reference:
    """mlx_lm's own greedy answer to one prompt, alone."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]  # at each token, the best log probability less the second best


def difference(got: Sequence[int], reference: Reference) -> int | None:
    """The index of the first token that differs (the end of the shorter one counts), or None if all are equal."""
    for index, (mine, theirs) in enumerate(zip(got, reference.tokens, strict=False)):
        if mine != theirs:
            return index
    return None if len(got) == len(reference.tokens) else min(len(got), len(reference.tokens))


def assert_same(got: Sequence[Sequence[int]], references: Sequence[Reference], max_forgiven: int = 0) -> None:
    """Raises AssertionError naming the first prompt with another answer, or for more near ties than `max_forgiven`."""
    assert len(got) == len(references)
    forgiven = []
    for prompt, (tokens, reference) in enumerate(zip(got, references, strict=True)):
        index = difference(tokens, reference)
        if index is None:
            continue
        assert len(tokens) == len(reference.tokens), f"prompt {prompt}: {len(tokens)} tokens: {list(tokens)}"
        gap = reference.gaps[index]
        assert gap < NEAR_TIE, (
            f"prompt {prompt} differs at token {index}, where the reference's choice leads by {gap:.3g}:\n"
            f"got       {list(tokens)}\nreference {list(reference.tokens)}"
        )
        forgiven.append((prompt, index))
    assert len(forgiven) <= max_forgiven, f"{len(forgiven)} near ties, more than {max_forgiven}: {forgiven}"
