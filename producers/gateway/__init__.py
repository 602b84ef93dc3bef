"""The OpenAI API over HTTP: vLLM's own server application, with the engine swapped for the queue.

vLLM renders chat templates, tokenises, parses tools and reasoning, and makes the JSON; this package puts the token ids on the
queue and gives the answers back. There is no engine and no device in this process. Only the modules that say so import vLLM,
which takes seconds: `exchange`, `failures`, `body`, `front`, `submission`, `settings`, `metrics` and `admin` do not.
"""
