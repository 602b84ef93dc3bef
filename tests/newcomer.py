"""Does what README tells a newcomer to do, in a fresh clone, as printed: `python tests/newcomer.py [--tests] [REPOSITORY]`.

Not part of `make test`: it builds an environment of its own and starts real engines (about ten minutes; with `--tests` the README's test
commands too). Every command that README shows in a block is walked, and those inside its sentences that need nothing but what is there.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

COMMAND = re.compile(r"^    ((?:make|jetwake|\.venv/bin/jetwake|curl|\.) .*)$")
INLINE = re.compile(r"`(jetwake (?:batch run|doctor|top)[^`]*)`")
UP_READY_S = 600
GLANCE_S = 8
"""How long a command that goes on until it is stopped is looked at."""
ENDLESS = ("jetwake top", "jetwake dashboard")
LONG = ("make test", "make check")


def commands(readme: str) -> list[str]:
    """In their order, without the remarks behind them."""
    found: list[str] = []
    for line in re.sub(r"\\\n\s*", "", readme).splitlines():
        block = COMMAND.match(line)
        found += [re.sub(r"\s+#\s.*$", "", block[1]).strip()] if block else INLINE.findall(line)
    return found


def python_blocks(readme: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)


@dataclass
class Walk:
    """`root`: the clone. Everything runs there, with its own environment on the path once that was activated."""

    root: Path
    with_tests: bool
    is_active: bool = False
    system: subprocess.Popen[str] | None = None
    request_id: str = ""
    broker: str = ""
    failures: list[str] = field(default_factory=list)

    def step(self, line: str) -> None:
        began_s = time.monotonic()
        print(f"$ {line}", flush=True)
        try:
            self._walk(line)
        except (subprocess.SubprocessError, AssertionError, ValueError) as error:
            self.failures.append(line)
            print(f"  FAILED: {error}", flush=True)
        print(f"  {time.monotonic() - began_s:.1f} s", flush=True)

    def _walk(self, line: str) -> None:
        if line in LONG and not self.with_tests:
            print("  left out: --tests walks it")
        elif line.startswith(". "):
            assert (self.root / line[2:].strip()).exists(), "the file to source is missing"
            self.is_active = True
        elif line.split()[0].endswith("jetwake") and line.split()[1] == "up":
            self._up(self._filled(line))
        elif line.startswith(ENDLESS):
            self._glance(self._filled(line))
        else:
            output = self._run(self._filled(line))
            if line.startswith("jetwake ask") and "--json" in line:
                self.request_id = json.loads(output)["request_id"]
            if line == "make demo":
                assert "Paris" in output, "the demo did not say Paris"

    def _filled(self, line: str) -> str:
        """With this walk's own values in the places that README leaves to the reader."""
        for placeholder, value in {
            "REQUEST_ID": self.request_id,
            "/path/to/a/checkpoint": str(self._checkpoint()) if "/path/to" in line else "",
            "--duration 10m": "--duration 20s",
            "in.jsonl": "batch-in.jsonl",
            "out.jsonl": "batch-out.jsonl",
        }.items():
            if placeholder in line:
                assert value, f"nothing to put for {placeholder}"
                line = re.sub(rf"(?<![\w-]){re.escape(placeholder)}", value, line)
        return line

    def _checkpoint(self) -> Path:
        return Path(self._run(".venv/bin/jetwake model fetch tiny").strip().splitlines()[-1])

    def _environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("JETWAKE_") and name != "PYTHONPATH"}
        return own | {"PATH": f"{self.root / '.venv' / 'bin'}:{own['PATH']}"} if self.is_active else own

    def _run(self, line: str) -> str:
        done = subprocess.run(
            line, shell=True, cwd=self.root, env=self._environment(), capture_output=True, text=True, timeout=3600, check=False
        )
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        print("  " + (done.stdout.strip().splitlines() or ["(no output)"])[-1][:160])
        return done.stdout

    def _glance(self, line: str) -> None:
        process = self._start(line)
        try:
            process.wait(GLANCE_S)
            raise AssertionError(f"it ended by itself with exit code {process.returncode}: {process.communicate()[0][-1000:]}")
        except subprocess.TimeoutExpired:
            self._stop(process)

    def _up(self, line: str) -> None:
        self.down()
        told = self.root / "up.log"
        with told.open("w") as log:
            self.system = self._start(line, log)
        said, until_s = "", time.monotonic() + UP_READY_S
        while "ready" not in said:
            assert self.system.poll() is None, f"it ended with exit code {self.system.returncode}: {said[-1500:]}"
            assert time.monotonic() < until_s, f"not ready after {UP_READY_S} s: {said[-1500:]}"
            time.sleep(0.2)
            said = told.read_text()
        found = re.search(r"nats://\S+", said)
        self.broker = found[0] if found else ""

    def _start(self, line: str, output: IO[str] | int = subprocess.PIPE) -> subprocess.Popen[str]:
        return subprocess.Popen(
            shlex.split(line), cwd=self.root, env=self._environment(), stdout=output, stderr=subprocess.STDOUT, text=True
        )

    def _stop(self, process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGINT)
        process.wait(60)

    def down(self) -> None:
        if self.system is not None:
            self._stop(self.system)
            self.system = None

    def program(self, text: str) -> None:
        """A Python block, at the broker of the system that runs."""
        print("$ python (a block of README)", flush=True)
        assert self.broker, "`jetwake up` did not say where its broker is"
        path = self.root / "newcomer_block.py"
        path.write_text(text.replace("nats://127.0.0.1:4222", self.broker))
        try:
            self._run(f"python {path}")
        except AssertionError as error:
            self.failures.append("python block")
            print(f"  FAILED: {error}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", nargs="?", default=str(Path(__file__).parents[1]))
    parser.add_argument("--tests", action="store_true", help="walk `make test` and `make check` too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        root = Path(folder) / "jetwake"
        subprocess.run(["git", "clone", "--quiet", given.repository, str(root)], check=True)
        readme = (root / "README.md").read_text()
        walk = Walk(root, given.tests)
        blocks = python_blocks(readme)
        for line in commands(readme):
            if line.startswith("jetwake trace stats") and not (root / "trace.jsonl.gz").exists():
                walk.step("jetwake trace generate --requests 300 --output trace.jsonl.gz")
            if line.startswith("jetwake batch run"):
                asked = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
                body = {"model": "demo", "messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 4}
                (root / "batch-in.jsonl").write_text(json.dumps(asked | {"body": body}) + "\n")
            walk.step(line)
            if line.startswith("jetwake attach"):
                while blocks:
                    walk.program(blocks.pop(0))
        walk.down()
    print(f"failed: {walk.failures}" if walk.failures else "every command of README works as printed")
    return 1 if walk.failures else 0


if __name__ == "__main__":
    sys.exit(main())
