"""Chat templates and tokenising of ordinary prompts on the event loop, where that is fast. Imports vLLM.

vLLM hands both to threads, so that a slow tokenizer holds up nobody. With a fast one (`fast_tokenizer`), a prompt of thousands of tokens
takes less time than the way to a thread and back, for which two threads wait for each other.
"""

from typing import Any, cast

from vllm.renderers import hf

MOST_CHARACTERS = 64_000
"""Of what is done at once: less than a millisecond."""


def render_at_once(renderer: Any) -> None:
    """To be called only where the tokenizer is fast, and templates are the operator's own."""
    if not isinstance(renderer, hf.HfRenderer):
        return
    of_threads, apply_here = cast(Any, renderer), cast(Any, hf).safe_apply_chat_template
    apply_in_thread, tokenize_in_thread = of_threads._apply_chat_template_async, of_threads._tokenize_prompt_async

    async def apply(model_config: Any, tokenizer: Any, conversation: list[dict[str, Any]], **options: Any) -> Any:
        if options.get("tools") or sum(_length(message.get("content")) for message in conversation) > MOST_CHARACTERS:
            return await apply_in_thread(model_config, tokenizer, conversation, **options)
        return apply_here(model_config, tokenizer, conversation, **options)

    async def tokenize(prompt: Any, params: Any) -> Any:
        if len(prompt["prompt"]) > MOST_CHARACTERS:
            return await tokenize_in_thread(prompt, params)
        return of_threads._tokenize_prompt(prompt, params)

    of_threads._apply_chat_template_async, of_threads._tokenize_prompt_async = apply, tokenize


def _length(content: Any) -> int:
    return len(content) if isinstance(content, str) else 0 if content is None else MOST_CHARACTERS + 1
