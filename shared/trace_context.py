"""W3C Trace Context: the client's trace to which a request belongs (https://www.w3.org/TR/trace-context/).

Baton reports no spans, so it forwards the client's header with the parent id unchanged, as the specification allows. If
the client sends no valid header, the request starts a new trace.
"""

import re
from collections.abc import Sequence
from secrets import token_hex

FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def traceparent_of(headers: Sequence[str]) -> str:
    """Return the traceparent of a request, in version 00. `headers` are the values of all its traceparent headers.

    If there is no header, more than one header or an invalid header, the result is a new traceparent. A header is
    invalid if it is malformed, has version ff, or has an id that consists of zeros.
    """
    found = FORM.fullmatch(headers[0]) if len(headers) == 1 else None
    if found is not None:
        version, trace, parent, flags, rest = found.groups()
        is_known = version != "ff" and (version != "00" or rest is None)
        if is_known and int(trace, 16) and int(parent, 16):
            # If the header has a later version, forward only the fields of version 00 and the flag "sampled".
            return f"00-{trace}-{parent}-{flags if version == '00' else f'{int(flags, 16) & 1:02x}'}"
    return f"00-{_id(16)}-{_id(8)}-01"


def _id(num_bytes: int) -> str:
    while True:
        if int(drawn := token_hex(num_bytes), 16):
            return drawn
