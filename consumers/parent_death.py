"""No process outlives its parent: the kernel sends SIGKILL to a child the moment its parent is gone, however that died (Linux).

The one home of this for workers, for the engine processes they start, and for the broker of a local system.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Call in the child, as early as possible. Ends this process at once when the parent is gone already."""
    if sys.platform != "linux":
        return
    _order_of_the_kernel()()
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def dies_with(parent_pid: int) -> Callable[[], None] | None:
    """What to run in a child that is not Python, between fork and exec (`preexec_fn`). Nothing may be loaded there, so it is looked up here."""
    if sys.platform != "linux":
        return None
    order = _order_of_the_kernel()

    def in_child() -> None:
        order()
        if os.getppid() != parent_pid:  # it died before the order was given
            os._exit(1)

    return in_child


def _order_of_the_kernel() -> Callable[[], object]:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
