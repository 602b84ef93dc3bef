"""What the lines of a batch got so far, added up."""

from ...schemas.batches import BatchRecord, LineResult


class Tally:
    """Each line is added once. `failed_lines`: their numbers."""

    def __init__(self) -> None:
        self.completed = 0
        self.failed_lines: set[int] = set()
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0

    @property
    def failed(self) -> int:
        return len(self.failed_lines)

    def add(self, result: LineResult) -> None:
        if result.succeeded:
            self.completed += 1
        else:
            self.failed_lines.add(result.line)
        self.prompt_tokens += result.prompt_tokens
        self.cached_tokens += result.cached_tokens
        self.output_tokens += result.output_tokens

    def into(self, record: BatchRecord) -> BatchRecord:
        changes = {
            "completed_lines": self.completed,
            "failed_lines": self.failed,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
        }
        return record.model_copy(update=changes)
