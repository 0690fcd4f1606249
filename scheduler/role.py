"""A node's role is one word of data: where a request ends here."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Role:
    name: Literal["prefill", "decode"]
    ends_at: Literal["first_token", "last_token"]


PREFILL = Role("prefill", ends_at="first_token")  # then the request is handed off
DECODE = Role("decode", ends_at="last_token")  # takes handed-off KV, and prompts that nobody computed
ROLES: dict[str, Role] = {role.name: role for role in (PREFILL, DECODE)}
