"""The vLLM engine: the only package that imports vLLM on the worker side."""
