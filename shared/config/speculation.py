"""The value of --speculative-config, in vLLM's form: a JSON object, or only the name of the method."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MAX_SPECULATIVE_TOKENS = 32
MAX_LOOKUP = 16
DEFAULT_TOKENS = {"ngram": 8, "draft_model": 4, "mtp": 4, "eagle3": 4}
WITH_MODEL = ("draft_model", "eagle3")
ALIASES = dict.fromkeys(  # vLLM's other names for the method "mtp", one for each family of models
    ("qwen3_next_mtp", "qwen3_5_mtp", "deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp"), "mtp"
)


class SpeculativeConfig(BaseModel):
    """Speculative decoding. The names of the fields are vLLM's; the method "ngram" is prompt lookup.

    If `model` is given, the default of `method` is "draft_model". `method` may also be one of `ALIASES`.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", hide_input_in_errors=True)
    method: Literal["ngram", "draft_model", "mtp", "eagle3"]
    model: str = ""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=MAX_SPECULATIVE_TOKENS)] = 0  # 0: see `DEFAULT_TOKENS`
    prompt_lookup_min: Annotated[int, Field(ge=1, le=MAX_LOOKUP)] = 2
    prompt_lookup_max: Annotated[int, Field(ge=1, le=MAX_LOOKUP)] = 4

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, value: dict[str, Any]) -> dict[str, Any]:
        method = value.get("method", "draft_model" if value.get("model") else None)
        method = ALIASES.get(str(method), method)
        named = {} if method is None else {"method": method}
        return {"num_speculative_tokens": DEFAULT_TOKENS.get(str(method), 1)} | value | named

    @model_validator(mode="after")
    def _has_model(self) -> "SpeculativeConfig":
        if bool(self.model) != (self.method in WITH_MODEL):
            raise ValueError(f"model: required with the method {' or '.join(WITH_MODEL)}, refused with other methods")
        return self

    @model_validator(mode="after")
    def _ordered(self) -> "SpeculativeConfig":
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("prompt_lookup_min must be at most prompt_lookup_max")
        return self


def parse_speculation(text: str) -> SpeculativeConfig | None:
    """Return the configuration, or None if `text` is empty. Raises ValueError, which names the key and a fix."""
    if not text:
        return None
    try:
        value = json.loads(text) if text.lstrip().startswith("{") else {"method": text}
        return SpeculativeConfig(**value)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        words = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
        raise ValueError(f"{key}: {words}" if key else words) from None
    except json.JSONDecodeError as error:
        raise ValueError(f'must be JSON such as {{"method": "ngram"}}, or "ngram" ({error})') from None


def check_speculation(text: str) -> str:
    """Return `text` unchanged. Raises ValueError as `parse_speculation` does."""
    parse_speculation(text)
    return text
