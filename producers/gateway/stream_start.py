"""Where the text of an answer begins to be made: after the last tokens of its prompt, and not after all of them. Imports vLLM."""

import tokenizers.decoders
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor

LOOK_BACK_TOKENS = 32
"""A character has at most four bytes, and some tokens may be special and without text. vLLM's slow detokenizer looks back 7 tokens."""


def look_back_less(processor: OutputProcessor, core: EngineCoreRequest) -> None:
    """vLLM decodes the whole prompt before an answer's first token, which takes milliseconds for thousands of tokens."""
    detokenizer = processor.request_states[core.request_id].detokenizer
    prompt = core.prompt_token_ids or ()
    if isinstance(detokenizer, FastIncrementalDetokenizer) and len(prompt) > LOOK_BACK_TOKENS:
        skip = detokenizer.skip_special_tokens
        detokenizer.stream = tokenizers.decoders.DecodeStream(ids=list(prompt[-LOOK_BACK_TOKENS:]), skip_special_tokens=skip)
