"""A faster tokenizer for this process, where it is installed and gives the very same tokens. Imports transformers.

The package `fastokens` puts its own code behind the tokenizers that transformers loads; plain ones take 20 ms for a prompt of 4,000
tokens. Promises: it is in use only when it encoded and decoded samples as the plain one did, so that no prompt depends on it.
"""

import contextlib
import importlib.util
import logging
import os
import sys
from typing import Any, cast

logger = logging.getLogger(__name__)

VARIABLE = "VLLM_USE_FASTOKENS"
"""vLLM's own switch: with it set, to whatever value, vLLM decides."""
SAMPLES = (
    "",
    " ",
    "The capital of France is Paris.",
    "  two  spaces\tand a tab\r\n\r\n\nlines \n ",
    "def f(x: int) -> int:\n    return x**2  # 1234567890.5e-3\n" * 3,
    '{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}',
    "don't we'll I'M YOU'RE it's",
    "naïve café e\u0301 \ufb01 ﬀ Ünïcode ß ẞ",
    "漢字かな交じり文 한국어 кириллица العربية עברית हिन्दी ไทย",
    "😀👩\u200d👩\u200d👧 🇫🇷 \U0001f3f4\ufeff\u2028\u00a0\x00\x1f",
    "a" * 300 + " " * 100 + "\n" * 50 + "=" * 80,
    "<|im_start|>user\nhi<|im_end|>\n<s>[INST] x [/INST]</s><|eot_id|><unk><pad>",
)


def use_fast_tokenizer(source: str, **options: Any) -> bool:
    """To be called before vLLM loads the tokenizer of `source`. Whether it is in use."""
    if VARIABLE in os.environ or importlib.util.find_spec("fastokens") is None:
        return False
    import fastokens  # pyright: ignore[reportMissingTypeStubs]
    import transformers

    load = cast(Any, transformers).AutoTokenizer.from_pretrained
    try:
        plain = load(source, **options)
        wanted = [_encoded(plain, sample) for sample in samples_for(plain)]
        with contextlib.redirect_stdout(sys.stderr):  # it says so by itself
            fastokens.patch_transformers()
        fast = load(source, **options)
        if [_encoded(fast, sample) for sample in samples_for(plain)] == wanted:
            return True
        logger.info("the tokenizer of %s is used as it is: the fast one gives other tokens", source)
    except Exception as error:  # noqa: BLE001  what it cannot do it says with errors of all kinds; vLLM tells those of the tokenizer itself
        logger.info("the tokenizer of %s is used as it is: %s", source, error)
    with contextlib.redirect_stdout(sys.stderr):
        fastokens.unpatch_transformers()
    return False


def samples_for(tokenizer: Any) -> list[str]:
    """Also with the tokenizer's own special tokens, alone and within words."""
    own = [str(token) for token in tokenizer.all_special_tokens]
    return [*SAMPLES, *(f"a {token}b{token} \n{token}" for token in own), " ".join(SAMPLES)]


def _encoded(tokenizer: Any, text: str) -> tuple[list[int], list[int], str, list[str | None]]:
    """Tokens with and without special ones, the text made of them whole, and as it is made of one after the other."""
    from tokenizers import decoders

    with_specials: list[int] = tokenizer(text).input_ids
    plain: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    stream: Any = decoders.DecodeStream(skip_special_tokens=False)
    pieces = [stream.step(tokenizer._tokenizer, token) for token in with_specials]
    return with_specials, plain, tokenizer.decode(with_specials), pieces
