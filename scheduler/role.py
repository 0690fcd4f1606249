"""The roles of nodes. A prefill node ends a request at the first token, and a decode node ends it at the last one."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Role:
    name: Literal["prefill", "decode"]
    ends_at: Literal["first_token", "last_token"]


PREFILL = Role("prefill", ends_at="first_token")  # a request is handed off after its first token
DECODE = Role("decode", ends_at="last_token")  # receives the KV of prompts, and can also compute prompts
ROLES: dict[str, Role] = {role.name: role for role in (PREFILL, DECODE)}
