"""Small tokenizers: byte-level BPE, byte-fallback BPE, and the tokenizer of a real model."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer

TEXTS = [
    "Once upon a time 👩‍👩‍👧 there was a naïve 数学 😀 girl.\n",
    "<b>No\u00a0way</b>, she said 🇪🇺! ÿ\x00\x7f  twice",
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STORIES = Path(__file__).parents[1] / "data" / "stories260K"


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<｜end▁of▁text｜>"]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> tokenizers.Tokenizer:
    vocabulary = {name: number for number, name in enumerate(["<unk>", "<s>", "</s>"])}
    for name in [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "a", "b", "▁a", "ab", "▁▁", "é", "\n"]:
        vocabulary[name] = len(vocabulary)
    merges = [("▁", "a"), ("a", "b"), ("▁", "▁")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """Byte-level BPE with a ChatML template and no beginning-of-text token."""
    library = byte_level_tokenizer()
    special = [token.content for token in library.get_added_tokens_decoder().values()]
    return Tokenizer(library, {}, ChatTemplate(CHATML, {}, special))


@pytest.fixture(scope="session", params=["byte_level", "byte_fallback", "stories260K"])
def library(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    """A tokenizer of the `tokenizers` library. Tests compare Baton's tokenizer with this one."""
    if request.param == "byte_level":
        return byte_level_tokenizer()
    if request.param == "byte_fallback":
        return byte_fallback_tokenizer()
    return tokenizers.Tokenizer.from_file(str(STORIES / "tokenizer.json"))


@pytest.fixture(scope="session")
def fallback() -> Tokenizer:
    """Byte-fallback BPE whose config makes every text begin with <s>."""
    return Tokenizer(byte_fallback_tokenizer(), {"bos_token": "<s>", "add_bos_token": True})
