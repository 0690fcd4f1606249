"""The parameters with which engines pass the KV of a prompt to each other: for vLLM's connector NIXL, and for SGLang.

Engines trust these parameters and crash on malformed ones, so Baton checks the parameters before it sends them.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

NIXL = "nixl"
NIXL_CONFIG = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'  # a value of --kv-transfer-config
# An engine that gets these parameters keeps the blocks of the prompt until their lease ends. Its answer contains the
# parameters with which another engine reads the blocks.
PREFILL_PARAMS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
Text = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Counts = Annotated[list[Count], FailFast()]


class TransferParams(BaseModel):
    """The parameters of one connector."""

    model_config = ConfigDict(strict=True)

    @classmethod
    def read(cls, params: object) -> dict[str, Any]:
        """Check and return parameters, which may be JSON text. Raises ValueError, which names the field, if they are
        malformed."""
        try:
            found = cls.model_validate_json(params) if isinstance(params, bytes) else cls.model_validate(params)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ValueError(": ".join(["KV transfer parameters", *map(str, first["loc"]), first["msg"]])) from None
        return found.model_dump(exclude_unset=True)


class NixlParams(TransferParams):
    """The parameters with which an engine with NIXL reads the KV of a prompt. NIXL has more fields than these."""

    model_config = ConfigDict(extra="allow")

    do_remote_prefill: Annotated[bool, Field(ge=True)]  # true; a Literal would admit 1.0
    transfer_mode: Literal["pull"] = "pull"
    remote_engine_id: Text
    remote_request_id: Text
    remote_host: Text
    remote_port: Count
    tp_size: Count
    remote_num_tokens: Count
    remote_block_ids: Annotated[list[Counts], FailFast()]


class BootstrapParams(TransferParams):
    """The parameters with which a decode server of SGLang asks a prefill server for the KV of a prompt."""

    model_config = ConfigDict(extra="forbid")

    bootstrap_host: Text
    bootstrap_port: Annotated[int, Field(gt=0, lt=2**16)]
    bootstrap_room: Annotated[int, Field(gt=0, lt=2**63)]
