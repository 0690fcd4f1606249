"""Limits on requests, which both routers and nodes enforce."""

INT32_MAX = 2**31 - 1
MAX_LOGIT_BIASES = 300
MAX_LOGPROBS = 20
MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS = 128, 256  # limits of `bad_words`: number of words, and characters in each word
GREEDY_BELOW = 1e-5  # lower temperatures select greedy sampling, as in vLLM, because dividing by them could overflow
MAX_IMAGES, MAX_IMAGE_BYTES = 256, 48 << 20  # number of images in a request, and bytes of all their resized RGB pixels
MAX_ADAPTERS, MAX_NAME = 1024, 1024  # LoRA adapters of a node, and characters in the name of one
