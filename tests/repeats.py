"""Runs the fault tests again and again: `python tests/repeats.py [--times 50] [--jobs 2] [--log FILE] [TESTS...]`.

A fault test is trusted when it passed so many times in a row. Not part of `make test`: it takes hours. `--log` keeps what was run, a line for each
run, so that a stopped run goes on; the least often run file comes next. A failure keeps its output beside the log, and begins that file's
count anew. Exit code 1: something failed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAULT_TESTS = (
    *(
        f"tests/e2e/test_{name}.py"
        for name in ("attempts_and_routers", "back_pressure", "broker_faults", "claims", "dead_workers", "decode_claiming")
    ),
    *(f"tests/e2e/test_{name}.py" for name in ("drain", "failover", "field_reports", "killers", "phases", "restarts", "stalls")),
    *(f"tests/pipeline/test_{name}.py" for name in ("cluster", "connection", "consume", "endings", "faults", "settle", "terminals")),
    "tests/chaos",
    "tests/deploy/test_up_drain.py",
    "tests/gateway/test_resume_after_kill.py",
)
TIMEOUT_S = 1800
TESTS_PASSED, TESTS_FAILED = 0, 1


class Repeats:
    """`in_a_row`: of each file, since it last failed."""

    def __init__(self, files: list[str], times: int, log: Path) -> None:
        self._files, self._times, self._log = files, times, log
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self.in_a_row: Counter[str] = Counter()
        self.failures = 0
        if log.exists():
            for line in log.read_text().splitlines():
                self._count(json.loads(line))

    def work(self) -> None:
        while (name := self._next()) is not None:
            began_s = time.monotonic()
            code, output = _pytest(name)
            entry = {
                "tests": name,
                "code": code,
                "passed": _passed(output),
                "seconds": round(time.monotonic() - began_s),
                "commit": _commit(),
            }
            with self._lock:
                self._running.discard(name)
                self._count(entry)
                with self._log.open("a") as log:
                    print(json.dumps(entry), file=log)
                if code != TESTS_PASSED:
                    self.failures += 1
                    kept = self._log.with_suffix(f".failure-{self.failures}.txt")
                    kept.write_text(output)
                    print(f"FAILED {name}: {kept}", flush=True)
                print(f"{self.in_a_row[name]:3} in a row  {entry['seconds']:4} s  {name}", flush=True)

    def _next(self) -> str | None:
        with self._lock:
            left = [name for name in self._files if name not in self._running and self.in_a_row[name] < self._times]
            if not left:
                return None
            name = min(left, key=lambda name: self.in_a_row[name])
            self._running.add(name)
            return name

    def _count(self, entry: dict[str, object]) -> None:
        name = str(entry["tests"])
        self.in_a_row[name] = self.in_a_row[name] + 1 if entry["code"] == TESTS_PASSED else 0


def _pytest(name: str) -> tuple[int, str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-rN",
        "-o",
        "addopts=--strict-markers --import-mode=importlib",
        name,
    ]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, env=os.environ | {"COLUMNS": "140"})
    except subprocess.TimeoutExpired as error:
        return TESTS_FAILED, f"{error}\n{error.stdout}"
    return done.returncode, done.stdout + done.stderr


def _passed(output: str) -> int:
    found = re.search(r"(\d+) passed", output)
    return int(found[1]) if found else 0


def _commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("tests", nargs="*", default=FAULT_TESTS)
    arguments.add_argument("--times", type=int, default=50)
    arguments.add_argument("--jobs", type=int, default=2, help="so many files at a time")
    arguments.add_argument("--log", type=Path, default=Path("repeats.jsonl"))
    asked = arguments.parse_args()
    repeats = Repeats(list(asked.tests), asked.times, asked.log.absolute())
    workers = [threading.Thread(target=repeats.work) for _ in range(asked.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return 1 if repeats.failures else 0


if __name__ == "__main__":
    sys.exit(main())
