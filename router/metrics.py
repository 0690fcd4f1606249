"""What clients experience, under vLLM's metric names so that its dashboards work. Labels come from fixed sets only."""

from prometheus_client import CollectorRegistry, Counter, Histogram

TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    *(160, 640, 2560),
)
# vLLM's, and finer below 10 ms, where a small model's tokens are.
ITL_S = (
    *(0.001, 0.002, 0.004, 0.006, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80),
)
E2E_S = (*(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
FINISHES = ("stop", "length", "abort", "error")


class RequestMetrics:
    """Of samples as their clients see them; a request with `n` samples counts its prompt once."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(f"vllm:{name}", help_text, ["model_name"], buckets=buckets, registry=registry)
            return metric.labels(model_name)

        def counter(name: str, help_text: str) -> Counter:
            return Counter(f"vllm:{name}", help_text, ["model_name"], registry=registry).labels(model_name)

        self.time_to_first_token = histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_S)
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Between two tokens' arrivals.", ITL_S)
        # The same under the name that vLLM's published dashboard still asks for.
        self.time_per_output_token = histogram("time_per_output_token_seconds", "Between two tokens.", ITL_S)
        self.end_to_end = histogram("e2e_request_latency_seconds", "Arrival to last token.", E2E_S)
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.request_generation_tokens = histogram("request_generation_tokens", "Tokens of a sample.", TOKENS)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of accepted prompts.")
        self.generation_tokens = counter("generation_tokens", "Tokens given to clients.")
        success = Counter(
            "vllm:request_success", "Samples ended, by reason.", ["model_name", "finished_reason"], registry=registry
        )
        self._ended = {reason: success.labels(model_name, reason) for reason in FINISHES}

    def accepted(self, num_prompt: int) -> None:
        self.prompt_tokens.inc(num_prompt)
        self.request_prompt_tokens.observe(num_prompt)

    def token_gap(self, gap_s: float) -> None:
        self.inter_token_latency.observe(gap_s)
        self.time_per_output_token.observe(gap_s)

    def ended(self, reason: str, num_tokens: int, seconds: float) -> None:
        """`reason` is one of FINISHES: "abort" when the client left, "error" when we failed."""
        self._ended[reason].inc()
        self.request_generation_tokens.observe(num_tokens)
        self.end_to_end.observe(seconds)
