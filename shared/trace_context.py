"""W3C Trace Context: which trace of the client's a request belongs to (https://www.w3.org/TR/trace-context/).

Baton reports no spans of its own to a tracer, so it hands the client's header on as it came, which the
specification allows to whoever does not take part; a client without a valid one gets a new trace.
"""

import re
from collections.abc import Sequence
from secrets import token_hex

FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def traceparent_of(headers: Sequence[str]) -> str:
    """The request's traceparent, in version 00, given all its headers of that name. A new one where there is no
    header, more than one, or one that the specification calls invalid: a wrong form, version ff, ids of zeros only.
    """
    found = FORM.fullmatch(headers[0]) if len(headers) == 1 else None
    if found is not None:
        version, trace, parent, flags, rest = found.groups()
        is_known = version != "ff" and (version != "00" or rest is None)
        if is_known and int(trace, 16) and int(parent, 16):
            # Of a later version only what version 00 knows may be handed on, of its flags only "sampled".
            return f"00-{trace}-{parent}-{flags if version == '00' else f'{int(flags, 16) & 1:02x}'}"
    return f"00-{_id(16)}-{_id(8)}-01"


def _id(num_bytes: int) -> str:
    while True:
        if int(drawn := token_hex(num_bytes), 16):
            return drawn
