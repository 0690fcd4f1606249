"""A node's role, which decides where a request ends on it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Role:
    name: Literal["prefill", "decode"]
    ends_at: Literal["first_token", "last_token"]


PREFILL = Role("prefill", ends_at="first_token")  # then the request is handed off
DECODE = Role("decode", ends_at="last_token")  # accepts handed-off KV and prompts that were not computed elsewhere
ROLES: dict[str, Role] = {role.name: role for role in (PREFILL, DECODE)}
