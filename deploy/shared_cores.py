"""How the many processes of a local system share the cores of one machine.

Every request wakes each of them up several times. A process that has just been woken up interrupts the one that runs, as desktop programs should;
here that means two hundred switches for a request, cold caches, and a prefill that is interrupted for each token of another request. So local
systems run under the batch policy of the kernel: who wakes up waits for its turn, which is at once where a core is free, and a few
milliseconds at most where none is. `docs/performance.md` has what that is worth.
"""

import logging
import os
import sys

log = logging.getLogger(__name__)


def share_cores() -> None:
    """For this process and all that it starts from now on (Linux; nothing happens elsewhere, nor where somebody chose another policy)."""
    if sys.platform != "linux":
        return
    try:
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError as error:  # some sandboxes forbid it, and it is only a matter of speed
        log.info("processes are scheduled as usual, which is slower where there are few cores: %s", error)
