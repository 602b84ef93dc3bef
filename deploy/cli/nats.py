"""A broker of one's own: who may do what there (`nats permissions`), certificates, its configuration, and the streams (`nats declare`)."""

from pathlib import Path
from typing import Annotated

import typer

from .common import Broker, Limits, run, run_here, say, takes_broker, topology_settings

app = typer.Typer()

Names = list[str] | None
Folder = Annotated[Path, typer.Argument(help="Where the files are, or will be.")]


@app.command()
def permissions(
    folder: Folder = Path("nats"),
    gateway: Annotated[Names, typer.Option(help="Name of a gateway, as its --name. Repeatable.")] = None,
    client: Annotated[Names, typer.Option(help="Name of a program that uses the client, or runs batches. Repeatable.")] = None,
    tenant: Annotated[Names, typer.Option(help="Name of an application that asks gateways over NATS. Repeatable.")] = None,
    result_subject: Annotated[
        Names, typer.Option(help="Subject on which gateways may publish results of jobs: `docs.>`. Repeatable.")
    ] = None,
    resume_anywhere: Annotated[
        bool,
        typer.Option("--resume-anywhere", help="Gateways may read each other's answers, so that a broken stream can be resumed at any."),
    ] = False,
    url: Annotated[
        str, typer.Option(help="URL of the broker, for the environment of its users. All servers of a cluster, with commas.")
    ] = "",
    tls_ca: Annotated[Path | None, typer.Option(help="CA certificate, for the same. Else: that of FOLDER, if it has one.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Client certificate, the same.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Key of the client certificate, the same.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Only print what each role may do, as Markdown.")] = False,
) -> None:
    """Write users for a broker: a key pair for each, and accounts.conf with the narrowest permissions of each.

    Keys that are there stay. `docs/security.md` says how to use the files.
    """

    def body() -> None:
        from ..certificates import client_files
        from ..nats_users import ACCOUNTS_FILE, as_table, common_environment, users_of, write_users

        if table:
            print(as_table(), end="")
            return
        files = {"CA": tls_ca, "CERT": tls_cert, "KEY": tls_key}
        common = common_environment(url, files if any(files.values()) else client_files(folder))
        folder.mkdir(parents=True, exist_ok=True)
        users = users_of(gateway or [], client or [], tenant or [], resume_anywhere=resume_anywhere)
        for line in write_users(folder, users, result_subject or [], common):
            say(f"new key: {line}")
        print(folder / ACCOUNTS_FILE)

    run_here(body)


@app.command()
def certificates(
    folder: Folder = Path("nats"),
    host: Annotated[Names, typer.Option(help="Name or address of a server, as in URLs. Repeatable. Else: localhost and 127.0.0.1.")] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long server and client certificates are good.")] = 365,
) -> None:
    """Write an authority, and certificates of servers and clients: for a test cluster, or where there is no authority yet."""

    def body() -> None:
        from ..certificates import write_certificates

        for path in write_certificates(folder, host or ["localhost", "127.0.0.1"], days):
            print(path)

    run_here(body)


@app.command()
def config(
    folder: Folder = Path("nats"),
    listen: Annotated[str, typer.Option(help="HOST:PORT for clients.")] = "0.0.0.0:4222",
    store: Annotated[Path, typer.Option(help="Folder of its data.")] = Path("/data/jetstream"),
    server: Annotated[str, typer.Option(help="Name of this server in a cluster.")] = "",
    route: Annotated[Names, typer.Option(help="HOST:PORT of another server of the cluster. Repeatable.")] = None,
    cluster_listen: Annotated[str, typer.Option(help="HOST:PORT for the other servers.")] = "0.0.0.0:6222",
    at: Annotated[Path | None, typer.Option(help="Where FOLDER is for the server, when it is mounted elsewhere.")] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Sync to disk every two minutes: a power cut may lose accepted requests.")] = False,
) -> None:
    """Write a configuration for nats-server as Jetwake wants it, with the permissions and certificates that FOLDER has.

    It is FOLDER/nats-server.conf, or FOLDER/NAME.conf of the server of that name: `nats-server -c nats/nats-server.conf`.
    """

    def body() -> None:
        from ...schemas.errors import SetupError
        from ..nats_config import ClusterPlace
        from ..nats_folder import write_config

        if route and not server:
            raise SetupError("--route needs --server: servers of a cluster have names of their own")
        place = ClusterPlace("jetwake", server, cluster_listen, route) if route else None
        print(write_config(folder, at or folder.absolute(), listen, store, place, sync_always=not fast))

    run_here(body)


@app.command()
@takes_broker
def declare(
    broker: Broker,
    model: Annotated[Names, typer.Option(help="Name of a model whose gateways run jobs and batches. Repeatable.")] = None,
    limit: Limits = None,
) -> None:
    """Make and update the streams, once, as a user that may: where processes have users of their own, they may not.

    Says what it made or changed. With --model also the queues of that model, which gateways may not make.
    """

    async def body() -> None:
        from ...pipeline.connection import Bus
        from ..nats_declare import declare_all

        async with Bus.connect(broker.settings(), name="declare") as bus:
            for line in await declare_all(bus, topology_settings(limit), model or []):
                print(line)

    run(body)
