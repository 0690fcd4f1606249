"""Define locust users that each stream one chat answer after another."""

import os

from locust import HttpUser, task


class Reader(HttpUser):
    """A user who reads a stream to its end."""

    @task
    def chat(self) -> None:
        body = {"model": os.environ["BATON_CLIENTS_MODEL"], "max_tokens": 8, "stream": True}
        body["messages"] = [{"role": "user", "content": "Tell me a story"}]
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as response:
            lines = [line for line in response.iter_lines() if line]
            if not lines or lines[-1] != b"data: [DONE]":
                response.failure(f"the stream is incomplete: {lines[-1:]}")
