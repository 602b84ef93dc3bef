"""Reads and writes `golden.txt`: for each message its type tag, what it says as a comment, and its bytes in hex, 32 to a line."""

import json
import textwrap
from pathlib import Path

from jetwake.schemas.codec import Message

FILE = Path(__file__).parent / "golden.txt"


def read_golden() -> dict[str, bytes]:
    kept, tag = dict[str, str](), ""
    for line in FILE.read_text().splitlines():
        if line.startswith("["):
            tag = line.strip("[]")
            kept[tag] = ""
        elif line and not line.startswith("#"):
            kept[tag] += line
    return {tag: bytes.fromhex(text) for tag, text in kept.items()}


def write_golden(encoded: dict[str, tuple[Message, bytes]]) -> None:
    parts = ["# The bytes of every message; see test_golden.py.\n"]
    for tag, (message, data) in encoded.items():
        said = json.dumps(message.model_dump(), default=lambda value: f"0x{value.hex()}")
        comment = textwrap.fill(said, 120, initial_indent="# ", subsequent_indent="#   ", break_long_words=False)
        parts.append(f"[{tag}]\n{comment}\n" + "\n".join(textwrap.wrap(data.hex(), 64)) + "\n")
    FILE.write_text("\n".join(parts))
