"""Numbers as people read them, for terminal and verdicts. Pure. The same rules as words.js: halves are rounded up."""

from decimal import ROUND_HALF_UP, Decimal


def _fixed(number: float, digits: int) -> str:
    return str(Decimal(number).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def waits(number: int, noun: str) -> str:
    return f"{counted(number, noun)} {'waits' if number == 1 else 'wait'}"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{_fixed(share * 100, 0)} %"


def of_time(seconds: float | None) -> str:
    """Two or three digits, in the unit that fits."""
    if seconds is None:
        return "–"
    if seconds < 0.9995:
        return f"{_fixed(seconds * 1e3, 1 if seconds < 0.00995 else 0)} ms"
    if seconds < 99.5:
        return f"{_fixed(seconds, 2 if seconds < 9.995 else 1)} s"
    minutes, rest = divmod(int(_fixed(seconds, 0)), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def size(number_bytes: float | None) -> str:
    """In powers of 1,000, as networks count."""
    if number_bytes is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if number_bytes < 999.5:
            return f"{_fixed(number_bytes, 0 if number_bytes >= 99.5 or unit == 'B' else 1)} {unit}"
        number_bytes /= 1000
    return f"{_fixed(number_bytes, 1)} TB"
