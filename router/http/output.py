"""One sample's answer: its tokens become the text that its client is told, up to where a stop string ends it."""

from dataclasses import dataclass, field

from router.dispatch.requests import GenerationRequest, SampleDelta
from router.text.detokenizer import StopStrings
from router.text.tokenizer import Tokenizer
from shared.rpc.messages import Logprobs


@dataclass(slots=True)
class TextDelta:
    """What one piece adds to a sample. `text` may lag behind `tokens`: characters and stop strings are held back."""

    text: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    first: bool = False


class OutputProcessor:
    """Follows sample `index` of a request. It has ended when `finish` is set, and then hears nothing more."""

    def __init__(
        self,
        index: int,
        generation: GenerationRequest,
        tokenizer: Tokenizer,
        *,
        stops: tuple[str, ...],
        include_stop: bool,
        skip_special_tokens: bool,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.finish: str | None = None
        self.stop_reason: str | int | None = None
        self._generation = generation
        self._include_stop = include_stop
        self._detokenizer = tokenizer.detokenizer(generation.prompt, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stops, include=include_stop)
        self._first = True

    def process(self, piece: SampleDelta) -> TextDelta:
        """What `piece` adds. A stop string in it ends the sample, and the tokens behind it are as if never drawn."""
        said = TextDelta("", first=self._first)
        self._first = False
        last = len(piece.tokens) - 1
        for place, token in enumerate(piece.tokens):
            self.num_tokens += 1
            said.tokens.append(token)
            if piece.logprobs:
                said.logprobs.append(piece.logprobs[place])
            if piece.finish == "stop" and place == last and not self._include_stop:
                continue  # the token that stops the row is no part of the text
            said.text += self._searched(self._detokenizer.push((token,)))
            if self._stops.matched is not None:
                break
        if piece.finish is not None and self._stops.matched is None:
            said.text += self._searched(self._detokenizer.finish())
        self._end(piece, said)
        return said

    def _searched(self, text: str) -> str:
        """Text that is no part of a stop string. An answer below its least length may contain stop strings."""
        if self.num_tokens <= self._generation.min_tokens:
            return text
        return self._stops.push(text)

    def _end(self, piece: SampleDelta, said: TextDelta) -> None:
        if self._stops.matched is not None:
            self.finish, self.stop_reason = "stop", self._stops.matched
            return
        self.finish = piece.finish
        if piece.finish is None:
            return
        said.text += self._stops.finish()
        if piece.finish == "stop" and piece.tokens:
            self.stop_reason = piece.tokens[-1]
