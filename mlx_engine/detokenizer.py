"""From token ids to text as they come: no half characters, no special tokens, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers.decoders import DecodeStream

from mlx_engine.models.tokenizer import Tokenizer

# A character is at most four bytes, so at most four tokens: more of them without text are not the beginning of one.
_MAX_HELD_TOKENS = 8
# Tokens that are decoded again before new ones, because decoders look at what is before.
_CONTEXT_TOKENS = 8
_MAX_WINDOW_TOKENS = 32
_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """The text of one sequence, delta by delta. Belongs to one thread.

    The deltas joined are the decoding of all the ids, cut before the first stop string. "First" is the match that
    begins earliest in the text, so the result doesn't depend on how tokens cut the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, skip_special_tokens: bool = True) -> None:
        """Empty stop strings would stop everything: they raise ValueError."""
        if any(not string for string in stop):
            raise ValueError("a stop string must not be empty")
        self._decoder = _StreamDecoder(tokenizer, skip_special_tokens)
        self._matcher = _StopMatcher(tuple(stop)) if stop else None
        self._text: list[str] = []

    @property
    def text(self) -> str:
        """All that `push` and `finish` have returned."""
        return "".join(self._text)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; nothing more will come."""
        return self._matcher is not None and self._matcher.matched is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._matcher.matched if self._matcher is not None else None

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the sequence's next ids; returns the text that is certain now, which may be empty."""
        deltas = []
        for token_id in token_ids:
            if self.stopped:
                break
            delta = self._decoder.step(token_id)
            if delta:
                deltas.append(self._matcher.push(delta) if self._matcher is not None else delta)
        return self._emit("".join(deltas))

    def finish(self) -> str:
        """The text still held back, once the sequence has ended: half a character becomes U+FFFD. Call it once."""
        if self.stopped:
            return ""
        rest = self._decoder.finish()
        if self._matcher is not None:
            rest = self._matcher.push(rest) + self._matcher.finish()
        return self._emit(rest)

    def _emit(self, delta: str) -> str:
        if delta:
            self._text.append(delta)
        return delta


class _StreamDecoder:
    """The tokenizers library's streaming decoder, as long as it serves.

    It waits while the text ends in U+FFFD, which a sequence of broken bytes does for ever, and it raises when a later
    token changes earlier text. From there on a _WindowDecoder does the work.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._recent: list[int] = []  # ids, the held ones last
        self._num_held = 0  # ids since text last came
        self._window: _WindowDecoder | None = None

    def step(self, token_id: int) -> str:
        if self._window is not None:
            return self._window.step(token_id)
        self._recent.append(token_id)
        self._num_held += 1
        try:
            delta = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:  # the library raises bare Exception
            return self._open_window().text()
        if delta is not None:
            self._num_held = 0
            del self._recent[:-_CONTEXT_TOKENS]
            return str(delta)
        return self._open_window().text() if self._num_held > _MAX_HELD_TOKENS else ""

    def finish(self) -> str:
        return (self._window or self._open_window()).finish()

    def _open_window(self) -> _WindowDecoder:
        known = len(self._recent) - self._num_held
        self._window = _WindowDecoder(self._tokenizer, self._skip, self._recent[:known], self._recent[known:])
        return self._window


class _WindowDecoder:
    """Decodes the last few ids afresh at each step; whatever they are, it gives text out and never repeats any."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, known: list[int], new: list[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._token_ids = known + new
        self._length = len(self._decode(known))  # of the window's text that has been given out

    def step(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        return self.text()

    def text(self) -> str:
        # Only the last U+FFFD may be the beginning of a character.
        text = self._decode(self._token_ids)
        delta = text.removesuffix(_REPLACEMENT)[self._length :]
        self._length += len(delta)
        if len(self._token_ids) > _MAX_WINDOW_TOKENS:
            num_held = len(text) - self._length
            del self._token_ids[:-_CONTEXT_TOKENS]
            self._length = max(0, len(self._decode(self._token_ids)) - num_held)
        return delta

    def finish(self) -> str:
        return self._decode(self._token_ids)[self._length :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


class _StopMatcher:
    """Lets text through up to the first stop string, holding back what may be the beginning of one."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        self.matched: str | None = None

    def push(self, delta: str) -> str:
        """The text that no stop string can claim any more. Nothing once one has matched."""
        if self.matched is not None:
            return ""
        self._held += delta
        start, string = self._first_match()
        pending = self._first_beginning()
        if string is not None and start <= pending:
            return self._release(start, string)
        return self._release(min(pending, start), None)

    def finish(self) -> str:
        """What is held once no more text comes: beginnings will never be whole."""
        if self.matched is not None:
            return ""
        start, string = self._first_match()
        return self._release(start, string)

    def _release(self, end: int, matched: str | None) -> str:
        delta = self._held[:end]
        self._held = "" if matched is not None else self._held[end:]
        self.matched = matched
        return delta

    def _first_match(self) -> tuple[int, str | None]:
        """Where the earliest whole stop string begins and which it is; the end of the text if there is none."""
        found = [(at, string) for string in self._stop if (at := self._held.find(string)) >= 0]
        return min(found, default=(len(self._held), None), key=lambda item: item[0])

    def _first_beginning(self) -> int:
        """Where the earliest stop string that may still become whole begins; the end of the text if there is none."""
        longest = 0
        for string in self._stop:
            for size in range(min(len(string) - 1, len(self._held)), longest, -1):
                if self._held.endswith(string[:size]):
                    longest = size
                    break
        return len(self._held) - longest
