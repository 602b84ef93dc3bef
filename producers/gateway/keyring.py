"""The API keys a gateway knows, what tenant each speaks for, and the salt of a tenant's cache.

Reads a file of keys. Promises: a key is compared by its digest, in constant time, and is in no text or log; a salt cannot be
guessed or made without the secret, and no two tenants have the same one.
"""

import hashlib
import hmac
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from ...schemas.codec import first_complaint
from ...schemas.errors import SetupError
from ...schemas.keys import ApiKey, key_digest

_SALT_PURPOSE = b"jetwake cache salt 1"
MIN_SECRET_CHARACTERS = 16


class KeyRing:
    """Frozen: a change makes a new one."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._by_digest = {key.digest: key for key in keys}

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(self, presented: str) -> ApiKey | None:
        """Finding by digest tells a guesser nothing about a key: the digest of a guess that is nearly right is nowhere near."""
        digest = key_digest(presented)
        found = self._by_digest.get(digest)
        return found if found is not None and hmac.compare_digest(found.digest, digest) else None


def cache_salt(secret: bytes, tenant: str) -> str:
    """Each part is preceded by its length, so that no two lists of parts are the same bytes."""
    framed = b"".join(len(part).to_bytes(4, "big") + part for part in (_SALT_PURPOSE, tenant.encode()))
    return hmac.new(secret, framed, hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class KeyFile:
    """`secret` None: the one in the broker is used."""

    keys: tuple[ApiKey, ...]
    secret: bytes | None = None


def read_key_file(path: Path) -> KeyFile:
    """YAML (`keys:` a list, and perhaps `secret:`), or JSON lines with one key each. Raises SetupError; never with a key in its text."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"the file of API keys {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    entries, secret = _json_lines(path, text) if path.suffix == ".jsonl" else _yaml(path, text)
    keys = tuple(_key(path, number, entry) for number, entry in enumerate(entries, 1))
    if not keys:
        raise SetupError(f"{path} has no keys")
    return KeyFile(keys, secret)


def _json_lines(path: Path, text: str) -> tuple[list[Any], None]:
    entries: list[Any] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                entries.append(json.loads(line))
            except ValueError:
                raise SetupError(f"{path}, line {number}: no JSON") from None  # the words of the error would show the line
    return entries, None


def _yaml(path: Path, text: str) -> tuple[list[Any], bytes | None]:
    try:
        fields: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise SetupError(f"{path} is no YAML{f' (line {mark.line + 1})' if mark is not None else ''}") from None
    if not isinstance(fields, dict):
        raise SetupError(f"{path}: wanted `keys:` and a list of keys, and perhaps `secret:`")
    named = cast(dict[str, Any], fields)
    entries = named.pop("keys", None)
    secret = named.pop("secret", None)
    if named or not isinstance(entries, list):
        raise SetupError(f"{path}: wanted `keys:` and a list of keys, and perhaps `secret:`")
    if secret is not None and (not isinstance(secret, str) or len(secret) < MIN_SECRET_CHARACTERS):
        raise SetupError(f"{path}: `secret` must be a text of at least {MIN_SECRET_CHARACTERS} characters")
    return cast(list[Any], entries), secret.encode() if isinstance(secret, str) else None


def _key(path: Path, number: int, entry: Any) -> ApiKey:
    """`key`, or its `sha256`; `tenant`; perhaps `class`, `requests_per_minute`, `tokens_per_minute` and `note`."""
    if not isinstance(entry, dict):
        raise SetupError(f"{path}, key {number}: wanted `key` (or `sha256`) and `tenant`")
    fields = dict(cast(dict[str, Any], entry))
    key, digest = fields.pop("key", None), fields.pop("sha256", None)
    if (key is None) == (digest is None) or not isinstance(key or digest, str) or not (key or digest):
        raise SetupError(f"{path}, key {number}: give `key`, or its `sha256`, and not both")
    if "class" in fields:
        fields["priority_class"] = fields.pop("class")
    unknown = fields.keys() - {"tenant", "priority_class", "requests_per_minute", "tokens_per_minute", "note"}
    if unknown:
        raise SetupError(f"{path}, key {number}: there is no field {sorted(unknown)[0]!r}")
    try:
        return ApiKey(digest=key_digest(key) if key is not None else digest.lower(), **fields)
    except ValidationError as error:
        raise SetupError(f"{path}, key {number}: {first_complaint(error)}") from None
