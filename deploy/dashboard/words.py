"""Numbers as people read them, for terminal and verdicts. Pure."""


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def waits(number: int, noun: str) -> str:
    return f"{counted(number, noun)} {'waits' if number == 1 else 'wait'}"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share * 100:.0f} %"


def of_time(seconds: float | None) -> str:
    """Two or three digits, in the unit that fits."""
    if seconds is None:
        return "–"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.1f} ms" if seconds < 0.00995 else f"{seconds * 1e3:.0f} ms"
    if seconds < 99.5:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def size(number_bytes: float | None) -> str:
    """In powers of 1,000, as networks count."""
    if number_bytes is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if number_bytes < 999.5:
            return f"{number_bytes:.0f} {unit}" if number_bytes >= 99.5 or unit == "B" else f"{number_bytes:.1f} {unit}"
        number_bytes /= 1000
    return f"{number_bytes:.1f} TB"
