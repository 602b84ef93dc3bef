"""Load for one HTTP endpoint: so many connections, each asking again as soon as it was answered.

`wrk` makes it where it is installed; else a small client of our own, which costs the machine several times as much for each request.
"""

import asyncio
import json
import resource
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..schemas.errors import SetupError

_LAST_CHUNK = b"0\r\n\r\n"
_SCRIPT = """
local number, tails = 0, dofile(wrk.path_of_tails)
request = function()
  number = number + 1
  local body = tails.head .. (tails.numbered and number or "") .. tails[number % #tails + 1]
  return wrk.format("POST", nil, {["Content-Type"] = "application/json"}, body)
end
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format(
    '{"requests": %d, "seconds": %f, "failures": %d, "ms_p50": %f, "ms_p99": %f}\\n',
    summary.requests, summary.duration / 1e6, e.connect + e.read + e.write + e.status + e.timeout,
    latency:percentile(50) / 1000, latency:percentile(99) / 1000))
end
"""


@dataclass(frozen=True)
class Bodies:
    """The body of request n is `head`, n if `numbered`, and one of `tails` in turn. All are the insides of JSON, and plain ASCII."""

    head: str
    tails: Sequence[str]
    numbered: bool

    def body(self, number: int) -> bytes:
        return f"{self.head}{number if self.numbered else ''}{self.tails[number % len(self.tails)]}".encode()


@dataclass(frozen=True)
class Load:
    """`cpu_s`: of the program that made the load."""

    program: str
    requests: int
    failures: int
    seconds: float
    ms_p50: float
    ms_p99: float
    cpu_s: float


async def load(url: str, bodies: Bodies, connections: int, seconds: float, folder: Path, program: str = "") -> Load:
    """Raises SetupError when `wrk` is wanted and not there, or fails."""
    program = program or ("wrk" if shutil.which("wrk") else "own")
    if program == "wrk":
        return await _with_wrk(url, bodies, connections, seconds, folder)
    return await _with_own_client(url, bodies, connections, seconds)


async def _with_wrk(url: str, bodies: Bodies, connections: int, seconds: float, folder: Path) -> Load:
    tails, script = folder / "tails.lua", folder / "load.lua"
    parts = [f"head = {json.dumps(bodies.head)}", f"numbered = {json.dumps(bodies.numbered)}", *map(json.dumps, bodies.tails)]
    tails.write_text("return {" + ",\n".join(parts) + "}")
    script.write_text(_SCRIPT.replace("wrk.path_of_tails", json.dumps(str(tails))))
    command = ["-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "60s", "-s", str(script), url]
    before_s = _children_cpu_s()
    try:
        wrk = await asyncio.create_subprocess_exec("wrk", *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    except FileNotFoundError:
        raise SetupError("wrk is not installed: install it, or leave --load out to use the client that is built in") from None
    try:
        output, _ = await wrk.communicate()
    finally:
        if wrk.returncode is None:
            wrk.kill()
    line = next((line for line in output.decode().splitlines() if line.startswith("{")), None)
    if wrk.returncode or line is None:
        raise SetupError(f"wrk failed: {output.decode()[-500:]}")
    return Load(program="wrk", cpu_s=_children_cpu_s() - before_s, **json.loads(line))


def _children_cpu_s() -> float:
    """Of children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


async def _with_own_client(url: str, bodies: Bodies, connections: int, seconds: float) -> Load:
    times_ms, failures, numbers = list[float](), list[str](), count(1)
    started_s, cpu_s = time.perf_counter(), time.process_time()
    until_s = started_s + seconds
    async with asyncio.TaskGroup() as tasks:
        for _ in range(connections):
            tasks.create_task(_one_connection(url, bodies, numbers, until_s, times_ms, failures))
    if len(times_ms) < 2:
        raise SetupError(f"hardly any request was answered: {failures[:1]}")
    cuts = statistics.quantiles(times_ms, n=100, method="inclusive")
    took_s = time.perf_counter() - started_s
    return Load("own", len(times_ms), len(failures), took_s, cuts[49], cuts[98], time.process_time() - cpu_s)


async def _one_connection(
    url: str, bodies: Bodies, numbers: Iterator[int], until_s: float, times_ms: list[float], failures: list[str]
) -> None:
    parts: Any = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        while time.perf_counter() < until_s:
            sent_s, body = time.perf_counter(), bodies.body(next(numbers))
            head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            if not answer.startswith(b"HTTP/1.1 200") or b"chunked" not in answer:
                failures.append(answer.decode(errors="replace"))
                return
            while not answer.endswith(_LAST_CHUNK):
                part = await reader.read(1 << 16)
                if not part:
                    failures.append("the connection was closed within an answer")
                    return
                answer = answer[-len(_LAST_CHUNK) :] + part
            times_ms.append((time.perf_counter() - sent_s) * 1e3)
    finally:
        writer.close()
