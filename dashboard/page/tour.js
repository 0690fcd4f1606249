/* The guided tour: settings (JSON) and texts. tests/compare/test_playground.py checks what the texts say. */
export const TOUR = [
  {
    "title": "1. Static batching",
    "settings": {"policy": "static", "rate": 6, "requests": 200, "ttft_slo_ms": 1000},
    "text": ["A GPU computes many requests at once nearly as fast as one, because each step reads all weights of the model from memory anyway. The oldest way to use this is a fixed batch: collect requests, run them together until the longest answer ends, and only then start the next batch."],
    "look": "Look at the waiting requests: most of the time, new requests wait for a batch that is nearly over."
  },
  {
    "title": "2. Continuous batching",
    "settings": {"policy": "whole_prompt_mixed", "rate": 6, "requests": 200, "ttft_slo_ms": 1000},
    "text": ["Requests may join and leave at every step, which is called continuous batching (Orca, 2022). The traffic is the same as before."],
    "look": "Compare the two rows in “Your runs”: the time to first token falls from seconds to a fraction of a second."
  },
  {
    "title": "3. A prompt stalls the others",
    "settings": {"policy": "prefill_first", "rate": 4, "prompt": 4000, "answer": 200, "requests": 200, "ttft_slo_ms": 1000},
    "text": ["Now prompts are long. A prompt of 4,000 tokens takes about 80 ms, and every answer that is being written pauses until it is computed. The policy “prefill_first” computes whole prompts as soon as they arrive."],
    "look": "Tall orange steps are prompts. While one runs, no answer gets a token, so the time between tokens (TBT) is over its limit for most requests."
  },
  {
    "title": "4. Chunks",
    "settings": {"policy": "prefill_chunks_first", "budget": 512, "rate": 4, "prompt": 4000, "answer": 200, "requests": 200, "ttft_slo_ms": 1000},
    "text": ["A prompt can be cut into chunks, each of which fits into the token budget. Here, chunks still go first, so the answers pause until the last chunk of a prompt is computed."],
    "look": "No step is long any more, but TBT p99 has hardly improved: cutting alone does not help."
  },
  {
    "title": "5. Stall-free",
    "settings": {"policy": "stall_free", "budget": 512, "rate": 4, "prompt": 4000, "answer": 200, "requests": 200, "ttft_slo_ms": 1000},
    "text": ["“stall_free” (Sarathi-Serve, 2024) puts the decodes of all answers into every step, and fills the rest of the budget with a chunk. Now no answer ever waits for more than one step."],
    "look": "TBT p99 falls below the limit. Blue and orange share the steps."
  },
  {
    "title": "6. The budget is a trade-off",
    "settings": {"policy": "stall_free", "budget": 4096, "rate": 4, "prompt": 4000, "answer": 200, "requests": 200, "ttft_slo_ms": 1000},
    "text": ["With a larger budget, a prompt needs fewer steps, so its first token comes earlier, but each of these steps is longer, and all answers wait for it. With a smaller budget it is the reverse."],
    "look": "Move the slider of the budget, and watch TTFT and TBT p99. Then try “Find the best budget”."
  },
  {
    "title": "7. Disaggregation",
    "settings": {"prefill": 1, "decode": 1, "policy": "stall_free", "budget": 4096, "rate": 8, "prompt": 4000, "answer": 200, "requests": 200, "ttft_slo_ms": 1000},
    "text": ["With two GPUs, one can compute only prompts and the other only answers. The prefill node sends the KV of each prompt to the decode node. Prompts then cannot delay answers, whatever their length and whatever the budget.", "This does not mean that such a cluster carries more: two co-located nodes with a small budget can be just as good. Tune both clusters before you compare them."],
    "look": "The decode node has short blue steps only. Now set prefill to 0 and decode to 2: with this budget, answers stall. Then let the page find the best budget."
  },
  {
    "title": "8. Where each wins",
    "settings": {"prefill": 1, "decode": 1, "policy": "stall_free", "budget": 512, "rate": 27, "prompt": 300, "answer": 500, "requests": 300, "ttft_slo_ms": 1000},
    "text": ["Here prompts are short and answers long. The prefill node is idle most of the time, while the decode node is full, so requests wait for it. Two co-located nodes would share the work. With long prompts and short answers, it can be the reverse. Separate nodes pay off if both kinds of work keep their nodes busy and the limit for TBT is strict.", "This was the tour. For your own traffic, paste a trace, or run “baton plan”, which tries all splits."],
    "look": "Set prefill to 0 and decode to 2, and compare the rows in “Your runs”."
  }
];
