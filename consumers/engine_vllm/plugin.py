"""What runs in each process of a vLLM engine before the engine itself (entry point `vllm.general_plugins`).

Reads environment variables that a Jetwake worker sets, and does nothing without them. Promises that an engine process dies with
the process that started it, even when that one is killed, and that NIXL's progress thread sleeps between polls instead of taking
a whole core.
"""

import ctypes
import importlib
import multiprocessing
import os
import platform
import signal
import sys
import time
from typing import Any

from ..parent_death import die_with_parent

OWNER_VARIABLE = "_JETWAKE_ENGINE_OWNER"
"""Process id of the worker that owns the engine."""
PROGRESS_DELAY_VARIABLE = "_JETWAKE_NIXL_PROGRESS_DELAY_US"
SPIN_VARIABLE = "_JETWAKE_STEP_SPIN_S"

_BUSY_S = 1.0
_SLEEP_BUSY_MS = 1
_SLEEP_IDLE_MS = 20
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def register() -> None:
    """Called by vLLM in the worker's own process too, which is left alone."""
    owner = os.environ.get(OWNER_VARIABLE, "")
    if not owner or os.getpid() == int(owner):
        return
    parent = multiprocessing.parent_process()
    die_with_parent(os.getppid() if parent is None or parent.pid is None else parent.pid)
    # Ctrl-C reaches every process of a terminal: the worker hears it, lets its requests finish, and then ends the engine.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    allow_matrix_tiles()
    slow_down_progress_thread(int(os.environ.get(PROGRESS_DELAY_VARIABLE, "0")))
    if spin_s := os.environ.get(SPIN_VARIABLE, ""):
        shorten_spinning(float(spin_s))


def allow_matrix_tiles() -> None:
    """On x86 with AMX a process must ask the kernel before it uses the tiles, else it dies of an illegal instruction.

    vLLM's attention uses them and leaves the asking to a library that only large matrices reach: a decode engine whose first step
    ever is a pulled request would die. Where there is no AMX the kernel declines, and nothing uses it.
    """
    if sys.platform == "linux" and platform.machine() == "x86_64":
        ctypes.CDLL(None, use_errno=True).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)


def slow_down_progress_thread(delay_us: int) -> None:
    """NIXL's Python wrapper fixes the pause between polls at 0 and offers no setting, so the finished config is changed on its way."""
    try:
        wrapper = importlib.import_module("nixl._api")
    except ImportError:
        return  # The engine itself says best that NIXL is missing.
    module: Any = sys.modules[wrapper.nixl_agent.__module__]
    binding = module.nixlBind
    make_agent = binding.nixlAgent

    def make_tamed_agent(name: str, config: Any) -> Any:
        config.pthrDelay = delay_us
        return make_agent(name, config)

    module.nixlBind = _Replaced(binding, nixlAgent=make_tamed_agent)


def shorten_spinning(spin_s: float) -> None:
    """An engine's processes wait for each other's messages by spinning for a second before they sleep: on a few cores that takes the
    time of the very step they wait for, and of every other engine. So they sleep sooner, but never long: the socket that should wake
    them sometimes does not, and vLLM itself would then sleep for five seconds.
    """
    condition: Any = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast").SpinCondition
    make, wait = condition.__init__, condition.wait

    def make_short(self: Any, is_reader: bool, context: Any, notify_address: str, busy_loop_s: float = spin_s) -> None:
        make(self, is_reader, context, notify_address, busy_loop_s)

    def wait_briefly(self: Any, timeout_ms: int | None = None) -> None:
        limit_ms = _SLEEP_BUSY_MS if time.monotonic() - self.last_read < _BUSY_S else _SLEEP_IDLE_MS
        wait(self, limit_ms if timeout_ms is None else min(limit_ms, timeout_ms))

    condition.__init__, condition.wait = make_short, wait_briefly


class _Replaced:
    """A module with some names replaced, for one importer only."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
