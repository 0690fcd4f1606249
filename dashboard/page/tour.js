/* The guided tour: settings (JSON) and texts. `tries` are buttons that change the settings. Each term is explained
   before its use. tests/compare/test_playground.py checks what the texts say. */
export const TOUR = [
  {
    "title": "1. Static batching",
    "settings": {"policy": "static", "rate": 6, "requests": 200, "ttft_slo_ms": 1000},
    "text": ["A language model reads a prompt and writes an answer, one token after the other. A token is a word or a part of one. For each token, the GPU runs the whole model once: a step. One step can serve many requests, and takes hardly longer than a step for a single request, because most of its time goes into reading the model from memory.", "The oldest way to use this is a fixed batch: collect requests, run them together until the longest answer ends, and only then start the next batch. The time until a request gets the first token of its answer is called TTFT (time to first token). In this tour, its limit is 1,000 ms."],
    "look": "“Waiting requests” rises until the last request arrives, after 33 s: each request waits until a whole batch has ended, and half of the requests wait for over 20 s. In “Steps”, the blocks get lower as answers end, but no new request joins.",
    "tries": []
  },
  {
    "title": "2. Continuous batching",
    "settings": {"policy": "whole_prompt_mixed", "rate": 6, "requests": 200, "ttft_slo_ms": 1000},
    "text": ["Requests may join and leave at every step, which is called continuous batching ([Orca, 2022](https://www.usenix.org/conference/osdi22/presentation/yu)). The traffic is the same as before. Only the policy has changed: the rule by which the server chooses the work of each step. It is “whole_prompt_mixed” now: a new prompt joins the next step."],
    "look": "Compare the rows of the table: TTFT falls from over 20 seconds to a fraction of a second.",
    "tries": []
  },
  {
    "title": "3. A prompt stalls the others",
    "settings": {"policy": "prefill_first", "rate": 4, "prompt": 4000, "answer": 200, "requests": 200, "ttft_slo_ms": 1000},
    "text": ["Now prompts are long: 4,000 tokens on average. A prompt is computed before its answer begins, which is called prefill, and takes about 80 ms here. Then, each step adds one token to the answer, which is called a decode, and takes about 5 ms. The policy “prefill_first” computes whole prompts as soon as they arrive. Meanwhile, all other answers pause.", "TBT is the time between two tokens of an answer. Its p99 is the time within which 99 of 100 tokens of the answer come. The limit for it is 50 ms here."],
    "look": "In “Steps”, orange blocks are prompts; a wide block is a long step. A red bar above shows that answers wait for longer than the limit. Most requests miss the limit.",
    "tries": []
  },
  {
    "title": "4. Chunks",
    "settings": {"policy": "prefill_chunks_first", "budget": 512, "rate": 4, "prompt": 4000, "answer": 200, "requests": 200, "ttft_slo_ms": 1000},
    "text": ["Each step has a token budget, the number of tokens that it may compute: 512 here. A longer prompt is cut into chunks, one for each step. With this policy, chunks still go first, so the answers pause until the last chunk of a prompt is computed."],
    "look": "In “Steps”, all orange blocks are narrow now, but the red bars are still there, and TBT p99 in the table has even risen a little: chunks alone do not help.",
    "tries": []
  },
  {
    "title": "5. Stall-free",
    "settings": {"policy": "stall_free", "budget": 512, "rate": 4, "prompt": 4000, "answer": 200, "requests": 200, "ttft_slo_ms": 1000},
    "text": ["The policy “stall_free” ([Sarathi-Serve, 2024](https://arxiv.org/abs/2403.02310)) puts the next token of every answer into each step, and fills the rest of the budget with a chunk of a prompt. So no answer waits for more than one step."],
    "look": "TBT p99 falls below the limit, and the red bars are gone. In “Steps”, blue (answers) and orange (prompts) share the steps.",
    "tries": []
  },
  {
    "title": "6. The budget is a trade-off",
    "settings": {"policy": "stall_free", "budget": 4096, "rate": 4, "prompt": 4000, "answer": 200, "requests": 200, "ttft_slo_ms": 1000},
    "text": ["With a larger budget, a prompt needs fewer steps, so its first token comes earlier, but each of these steps takes longer, and all answers wait for it. A smaller budget has the opposite effect."],
    "look": "Press the buttons, or move the slider of the budget, and compare TTFT and TBT p99 in the table. “Find the best budget” tries nine budgets.",
    "tries": [["Budget 256", {"budget": 256}], ["Budget 1,024", {"budget": 1024}], ["Budget 4,096", {"budget": 4096}]]
  },
  {
    "title": "7. Disaggregation",
    "settings": {"prefill": 1, "decode": 1, "policy": "stall_free", "budget": 4096, "rate": 8, "prompt": 4000, "answer": 200, "requests": 200, "ttft_slo_ms": 1000},
    "text": ["Until now, one node (a server with a GPU) computed prompts and answers, which is called co-located. Here, there are two nodes and twice the traffic. One node computes only prompts, and the other one only answers. This is called disaggregation ([DistServe, 2024](https://arxiv.org/abs/2401.09670)). The prefill node sends what the model has stored about each prompt, its KV, to the decode node. The steps of the decode node contain no prompts, so no prompt makes them longer, whatever the budget.", "This does not mean that such a cluster carries more traffic: two co-located nodes with a small budget can be just as good. Tune both clusters before you compare them."],
    "look": "In “Steps”, decode-0 has short blue steps only. Press the buttons: with this budget, answers of two co-located nodes stall; with a budget of 256, they do not.",
    "tries": [["Two co-located nodes", {"prefill": 0, "decode": 2}], ["… with budget 256", {"prefill": 0, "decode": 2, "budget": 256}], ["One of each", {}]]
  },
  {
    "title": "8. Where each wins",
    "settings": {"prefill": 1, "decode": 1, "policy": "stall_free", "budget": 512, "rate": 65, "prompt": 300, "answer": 500, "requests": 1000, "ttft_slo_ms": 1000},
    "text": ["Here prompts are short and answers long. The prefill node is idle most of the time, while the decode node is full: it runs at most 256 requests. The router sends it 34 more, whose prompts are computed in advance. These 34 get a first token, but then wait for a place (hatched in “Requests”), which is why some miss the limit for TBT. The router holds back all other requests, so even their first token is late. Two co-located nodes share the work. With long prompts and short answers, the result can be the opposite. Separate nodes pay off if both kinds of work keep their nodes busy and the limit for TBT is strict.", "This was the tour. For your own traffic, paste a trace, or run “baton plan”, which tries all splits."],
    "look": "In “Steps”, prefill-0 is empty most of the time. Press the button, and compare the rows of the table.",
    "tries": [["Two co-located nodes", {"prefill": 0, "decode": 2}]]
  }
];
