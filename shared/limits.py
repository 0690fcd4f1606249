"""Limits of requests that both routers and nodes enforce."""

INT32_MAX = 2**31 - 1
MAX_LOGIT_BIASES = 300
MAX_LOGPROBS = 20
MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS = 128, 256  # limits of `bad_words`: number of words, and characters in each word
GREEDY_BELOW = 1e-5  # a lower temperature selects greedy sampling, as in vLLM, because dividing by it could overflow
MAX_IMAGES, MAX_IMAGE_BYTES = 256, 48 << 20  # limits of a request: images, and bytes of all resized RGB pixels
