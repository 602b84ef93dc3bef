"""Run as a program: writes `golden.txt` from the examples."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from jetwake.schemas.codec import encode
from tests.schemas.examples import BY_TAG
from tests.schemas.golden_file import write_golden

write_golden({tag: (message, encode(message)) for tag, message in BY_TAG.items()})
