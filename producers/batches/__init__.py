"""Batches as OpenAI defines them: a file of requests in, a file of results out, each line exactly once whoever dies in between.

Here is everything that is not HTTP and not vLLM: reading and ordering lines (`lines`, `order`), sending them while there is room
(`window`, `running`), remembering what each got (`line_log`, `local_log`), and running a batch from start to end (`runner`).
"""
