"""vLLM's structural tags: free text that contains tags. A trigger begins a tag, whose content matches a schema."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from router.http.messages import StrictModel
from router.text.answer_grammar import lark_of
from router.text.tokenizer import Tokenizer
from shared.errors import RequestError
from shared.grammar import lark_grammar, with_json_options

MAX_TAGS = 128
Marker = Annotated[str, Field(min_length=1, max_length=256)]


class StructuralTag(StrictModel):
    """A tag begins with the text `begin` and ends with the text `end`. The content in between matches `schema`."""

    begin: Marker
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    end: Annotated[str, Field(max_length=256)]


class StructuralTags(StrictModel):
    """The tags that an answer may have. The `begin` of each tag starts with a trigger. The text outside the tags
    contains no trigger."""

    type: Literal["structural_tag"]
    structures: Annotated[list[StructuralTag], Field(min_length=1, max_length=MAX_TAGS)]
    triggers: Annotated[list[Marker], Field(min_length=1, max_length=MAX_TAGS)]

    def check(self, param: str) -> None:
        """Raise RequestError if a tag has no trigger, or a trigger has no tag."""
        if stray := next(
            (tag.begin for tag in self.structures if not tag.begin.startswith(tuple(self.triggers))), None
        ):
            raise RequestError(f"`{param}`: the tag {json.dumps(stray)} does not begin with a trigger.", param)
        unused = next((each for each in self.triggers if not self._tags_of(each)), None)
        if unused is not None:
            raise RequestError(f"`{param}`: the trigger {json.dumps(unused)} begins no tag.", param)

    def _tags_of(self, trigger: str) -> list[StructuralTag]:
        """Return the tags that this trigger starts. If a tag begins with several triggers, the shortest of them starts
        the tag, because an answer contains the shortest trigger first."""
        others = tuple(other for other in self.triggers if trigger.startswith(other) and other != trigger)
        return [tag for tag in self.structures if tag.begin.startswith(trigger) and not tag.begin.startswith(others)]

    def grammar(self, tokenizer: Tokenizer) -> str:
        """Return a grammar that allows the tags in an answer. If a trigger, `begin` or `end` contains the name of a
        special token, the answer must contain the token itself, not its name as text."""
        rules = ["TEXT: /(.|\\n)*/", f"start: ({' | '.join(f'tag_{n}' for n in range(len(self.triggers)))})* TEXT"]
        for number, trigger in enumerate(self.triggers):
            marker = lark_of(trigger, tokenizer)
            lazy = "" if marker.startswith("<[") else "[lazy]"  # the text ends at the first trigger
            contents = [
                f"{lark_of(tag.begin[len(trigger) :], tokenizer)} %json {json.dumps(with_json_options(tag.schema_))} "
                f"{lark_of(tag.end, tokenizer)}"
                for tag in self._tags_of(trigger)
            ]
            rules += [
                f"trigger_{number}{lazy}: TEXT {marker}",
                f"tag_{number}: trigger_{number} ({' | '.join(contents)})",
            ]
        return lark_grammar("\n".join(rules) + "\n")
