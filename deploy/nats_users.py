"""Users of a broker as files: a key pair and the settings for each, and the configuration that lets them in with the narrowest rights.

Writes a folder: `accounts.conf` for the broker (public keys and permissions, nothing secret), and under `users/` for each user the
seed (`.nk`, mode 0600), the public key (`.pub`) and the environment of its processes (`.env`). Promises: written again, it changes no
key that is there; where only the public key is there, the seed is kept by somebody else and is not made anew.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..pipeline.permissions import NAMED, ROLES, TOPOLOGY, Right, Role, inbox_prefix, published, rights, subscribed
from ..pipeline.settings import BrokerSettings
from ..pipeline.user_keys import new_seed_file, public_key
from ..schemas.errors import SetupError
from .certificates import client_files

ACCOUNT = "JETWAKE"
ACCOUNTS_FILE = "accounts.conf"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_RESULT_SUBJECT = re.compile(r"(?!jw\.)[A-Za-z0-9_=-]+(\.[A-Za-z0-9_=*-]+)*(\.>)?")


@dataclass(frozen=True)
class User:
    """`name`: empty for roles of which there is one user. `peers`: of a gateway, others whose streams it may resume."""

    role: Role
    name: str = ""
    peers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.role} {self.name}".strip()

    def file(self, folder: Path, suffix: str) -> Path:
        path = folder / "users" / self.role
        return path / f"{self.name}.{suffix}" if self.name else path.with_suffix(f".{suffix}")


def users_of(gateways: Sequence[str], clients: Sequence[str], tenants: Sequence[str], *, resume_anywhere: bool = False) -> list[User]:
    """`resume_anywhere`: gateways are each other's peers. Raises SetupError for names that cannot be part of a subject, or that are given twice."""
    users = [User(role) for role in ROLES if role not in NAMED]
    named: tuple[tuple[Role, Sequence[str]], ...] = (("gateway", gateways), ("client", clients), ("tenant", tenants))
    for role, names in named:
        for name in names:
            if _NAME.fullmatch(name) is None:
                raise SetupError(f"{role} {name!r}: a name has 1 to 64 letters, digits, hyphens and underscores")
            is_peer = resume_anywhere and role == "gateway"
            users.append(User(role, name, tuple(other for other in names if other != name) if is_peer else ()))
    readers = [user.name for user in users if user.role in ("gateway", "client")] + ["operator", "jobs", "batches"]
    twice = {name for name in readers if readers.count(name) > 1} | {name for name in tenants if tenants.count(name) > 1}
    if twice:
        raise SetupError(
            f"{', '.join(sorted(twice))}: a name that is used twice, or by Jetwake itself; each reads the answers of its own name"
        )
    return users


def write_users(folder: Path, users: Sequence[User], result_subjects: Sequence[str], common: dict[str, str]) -> list[str]:
    """A line for each user whose key was made. `common`: environment that all of them share. Raises SetupError."""
    for subject in result_subjects:
        if _RESULT_SUBJECT.fullmatch(subject) is None:
            raise SetupError(f"{subject!r} is no subject for results of jobs: tokens of letters, digits, _, - and =; not under jw.")
    made: list[str] = []
    keys: list[tuple[User, str]] = []
    for user in users:
        seed, public = user.file(folder, "nk"), user.file(folder, "pub")
        seed.parent.mkdir(parents=True, exist_ok=True)
        if seed.exists():
            key = public_key(seed)
        elif public.exists():
            key = public.read_text().strip()
        else:
            key = new_seed_file(seed)
            made.append(f"{user}: {seed}")
        public.write_text(key + "\n")
        user.file(folder, "env").write_text(_environment(user, seed, common))
        keys.append((user, key))
    (folder / ACCOUNTS_FILE).write_text(accounts_config(keys, result_subjects))
    return made


def common_environment(url: str, files: Mapping[str, Path | None]) -> dict[str, str]:
    """What all users of a broker share. `files`: as `client_files` gives them."""
    common = {"JETWAKE_NATS_URL": url} if url else {}
    return common | {f"JETWAKE_NATS_TLS_{what}": str(path.absolute()) for what, path in files.items() if path is not None}


def accounts_config(keys: Sequence[tuple[User, str]], result_subjects: Iterable[str] = ()) -> str:
    """For `include` in the configuration of the broker. Pure."""
    subjects = tuple(result_subjects)
    users = "\n".join(_user_config(user, key, rights(user.role, user.name, subjects, user.peers)) for user, key in keys)
    return f"""# Written by `jetwake nats permissions`: who may connect, and what each may do. Nothing in it is secret.
accounts {{
  {ACCOUNT} {{
    jetstream: enabled
    users: [
{users}
    ]
  }}
}}
"""


def settings_of(user: User, seed: Path) -> dict[str, str]:
    """The options of a process that connects as this user, by their environment variables."""
    values = {
        "JETWAKE_NATS_NKEY_FILE": str(seed),
        "JETWAKE_NATS_INBOX_PREFIX": inbox_prefix(user.role, user.name),
        "JETWAKE_NATS_TOPOLOGY": TOPOLOGY.get(user.role, "check"),
    }
    name = user.name or ("operator" if user.role == "operator" else "")
    named = {"JETWAKE_NATS_NAME": name, "JETWAKE_NATS_PEERS": ",".join(user.peers)}
    return values | {variable: value for variable, value in named.items() if value}


def broker_settings(folder: Path, user: User, url: str) -> BrokerSettings:
    """Of a process that connects as this user, with the files of this folder."""
    files, values = client_files(folder), settings_of(user, user.file(folder, "nk"))
    return BrokerSettings(
        url=url,
        nkey_file=Path(values["JETWAKE_NATS_NKEY_FILE"]),
        inbox_prefix=values["JETWAKE_NATS_INBOX_PREFIX"],
        name=values.get("JETWAKE_NATS_NAME", ""),
        peers=values.get("JETWAKE_NATS_PEERS", ""),
        topology=TOPOLOGY.get(user.role, "check"),
        tls_ca=files["CA"],
        tls_cert=files["CERT"],
        tls_key=files["KEY"],
    )


def _environment(user: User, seed: Path, common: dict[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in (common | settings_of(user, seed.absolute())).items())


def _user_config(user: User, key: str, given: Sequence[Right]) -> str:
    return f"""      # {user}
      {{
        nkey: {key}
        permissions: {{
          publish: {{ allow: {_list(published(given))} }}
          subscribe: {{ allow: {_list(subscribed(given))} }}
        }}
      }}"""


def _list(subjects: Sequence[str]) -> str:
    lines = "".join(f"            {json.dumps(subject)}\n" for subject in subjects)
    return f"[\n{lines}          ]"


def as_table() -> str:
    """What each role may do, in Markdown: the part of `docs/security.md` that is made of the code."""
    parts: list[str] = []
    for role in ROLES:
        name = f"<{role}>" if role in NAMED else ""
        given = rights(role, name)
        parts.append(f"### {role}\n\n| may | publishes | hears |\n|---|---|---|\n")
        parts += [f"| {right.what} | {_cell(right.publish)} | {_cell(right.subscribe)} |\n" for right in given]
        parts.append("\n")
    return "".join(parts).rstrip("\n") + "\n"


def _cell(subjects: Sequence[str]) -> str:
    return " ".join(f"`{subject}`" for subject in subjects)
