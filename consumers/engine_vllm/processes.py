"""The operating system's processes of one engine, found by a variable in their environment.

Promises that whatever vLLM's own shutdown leaves behind is gone: a start that failed half-way, or a process that hangs.
"""

import psutil

ENGINE_VARIABLE = "JETWAKE_ENGINE_ID"
RESOURCE_TRACKER = "multiprocessing.resource_tracker"


def engine_processes(engine_id: str) -> list[psutil.Process]:
    """Descendants of this process that were spawned for the engine."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        try:
            # Python's resource tracker must outlive the others: it removes the shared memory they leave.
            if process.environ().get(ENGINE_VARIABLE) == engine_id and RESOURCE_TRACKER not in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue  # It ended meanwhile, or is a zombie that only waits to be reaped.
    return found


def kill(processes: list[psutil.Process], wait_s: float = 5.0) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=wait_s)
