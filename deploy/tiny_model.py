"""A random Llama with a trained tokenizer, for tests: every process that makes it makes the same files."""

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from ..schemas.errors import SetupError

VOCABULARY_SIZE = 2048
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tiny(folder: Path, torch: Any, transformers: Any, tokenizers: Any) -> None:
    """Raises SetupError when these libraries would make another one."""
    _tokenizer(folder, transformers, tokenizers)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        # Wide margins between logits, so that greedy output varies and does not hang on the last bit of a sum.
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config = transformers.GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)


def _tokenizer(folder: Path, transformers: Any, tokenizers: Any) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # One thread and one iterator: equal counts in equal order, hence equal merges in every process.
    parallelism = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        tokenizer.train_from_iterator(_training_text(), trainer)
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM") if parallelism is None else os.environ.update(TOKENIZERS_PARALLELISM=parallelism)
    size = tokenizer.get_vocab_size()
    if size != VOCABULARY_SIZE:
        raise SetupError(f"the tiny tokenizer has {size} tokens instead of {VOCABULARY_SIZE}: tokenizers changed its training")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    fast.model_max_length = 8192
    fast.save_pretrained(folder)


def _training_text() -> Iterator[str]:
    """Made-up prose, the same everywhere: random() of a seeded Random is fixed by Python's documentation."""
    random = Random(7)

    def pick(choices: list[str]) -> str:
        return choices[int(random.random() * len(choices))]

    onsets = [
        "b",
        "br",
        "c",
        "ch",
        "d",
        "dr",
        "f",
        "g",
        "gl",
        "h",
        "j",
        "k",
        "l",
        "m",
        "n",
        "p",
        "pr",
        "qu",
        "r",
        "s",
        "st",
        "t",
        "tr",
        "v",
        "w",
        "z",
    ]
    nuclei = ["a", "e", "i", "o", "u", "ai", "ea", "oo", "ou", "y"]
    codas = ["", "", "ck", "d", "l", "m", "n", "ng", "r", "rn", "s", "sh", "st", "t", "x"]
    words = ["".join(pick(onsets) + pick(nuclei) + pick(codas) for _ in range(1 + int(random.random() * 3))) for _ in range(1500)]
    for _ in range(4000):
        line = " ".join(pick(words) for _ in range(4 + int(random.random() * 9)))
        yield f"{line.capitalize()}{pick(['.', '!', '?', ', ' + pick(words) + '.'])} {int(random.random() * 1000)}\n"
