"""How commands read a trace file: the options for files that hold texts. A command, or its own options, takes or extends `TextFiles`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..capacity.trace import Trace


@dataclass(frozen=True)
class TextFiles:
    """Conversations and batches have no times, and no lengths but those of their texts."""

    tokenizer: Annotated[str, typer.Option(help="Of files with texts: a model folder or hub name. Else four characters are a token.")] = ""
    arrivals: Annotated[
        float, typer.Option(min=0.0, metavar="PER_S", help="Of files without times: Poisson arrivals per second. 0: all come at once.")
    ] = 0.0
    turn_gap_s: Annotated[float, typer.Option(min=0.001, help="Between the turns of a conversation without times, on average.")] = 30.0
    answer_length: Annotated[int, typer.Option(min=1, help="Output tokens where the file does not say.")] = 256

    def read(self, file: Path) -> "Trace":
        """Raises SetupError."""
        from ...producers.text import load_text_codec
        from ..capacity.text_traces import TextOptions
        from ..capacity.trace_formats import read_trace

        encode = load_text_codec(self.tokenizer).encode if self.tokenizer else None
        text = TextOptions(self.arrivals or None, self.turn_gap_s, encode=encode, output_tokens=self.answer_length)
        return read_trace(file, text)
