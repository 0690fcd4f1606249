"""Which requests are here, whose each is, and how many tokens they brought: no more than a node can hold.

It is the event loop's alone. What a request is to compute stands in its router's outbox, not here.
"""

MAX_REQUESTS = 8192  # here at once; more had better wait at their routers
MAX_TOKENS = 1 << 23  # of all requests here, as they came: with 36 bytes each, 300 MB …
MAX_POOLS = 16  # … or as many as fit that many pools


class OverloadedError(ValueError):
    """This node does not take the request now; another one may."""


class ActiveRequests:
    def __init__(self, pool_tokens: int) -> None:
        self.router_of: dict[str, str] = {}
        self.num_tokens = 0
        self.max_tokens = max(MAX_TOKENS, MAX_POOLS * pool_tokens)
        self._sizes: dict[str, int] = {}  # tokens of each request, as it came; `num_tokens` is their sum

    def check(self, identity: str, num_tokens: int) -> None:
        """Raises ValueError when the id is taken, BusyError when there is no room for one more."""
        if identity in self.router_of:
            raise ValueError(f"request {identity} is already here")
        if len(self.router_of) >= MAX_REQUESTS or self.num_tokens + num_tokens > self.max_tokens:
            raise OverloadedError(
                f"this node has {len(self.router_of)} requests of {self.num_tokens} tokens: no more fit"
            )

    def put(self, identity: str, router: str, num_tokens: int) -> None:
        self.router_of[identity] = router
        self._sizes[identity] = num_tokens
        self.num_tokens += num_tokens

    def pop(self, identity: str) -> str | None:
        """Returns whose it was; None when it is not here."""
        self.num_tokens -= self._sizes.pop(identity, 0)
        return self.router_of.pop(identity, None)
