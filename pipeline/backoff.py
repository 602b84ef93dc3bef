"""How long to wait before trying again. Pure."""


def backoff_s(failures: int, first_s: float = 0.05, cap_s: float = 5.0) -> float:
    """After the first failure `first_s`, then doubled each time up to `cap_s`."""
    return min(cap_s, first_s * 2.0 ** min(max(failures, 1) - 1, 30))
