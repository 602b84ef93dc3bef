"""`jetwake batch submit`, `list`, `show`, `cancel` and `download`: batches of a running system, straight over its broker."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ..pipeline.catalogue import ModelCatalogue
from ..pipeline.clock import ServerClock
from ..pipeline.connection import Bus
from ..pipeline.publish import Publisher
from ..pipeline.settings import BrokerSettings
from ..producers.batches.desk import BatchDesk
from ..producers.batches.records import as_openai
from ..producers.batches.settings import BatchSettings
from ..schemas.batches import ENDED, BatchRecord
from ..schemas.errors import SetupError, UnknownModel

_PART_BYTES = 1 << 20
_LOOK_EVERY_S = 0.5


@asynccontextmanager
async def desk_of(broker: BrokerSettings, model: str | None = None) -> AsyncGenerator[BatchDesk]:
    """`model`: whose gateways run what is submitted; None: the only one there is, or any where that does not matter."""
    async with Bus.connect(broker, name="batches") as bus:
        publisher, clock = Publisher(bus), ServerClock(bus)
        await clock.sync()
        yield BatchDesk(bus, publisher, clock, await _model(ModelCatalogue(bus, publisher), model), BatchSettings())


async def submit(broker: BrokerSettings, path: Path, model: str | None, window: str, owner: str) -> BatchRecord:
    """Raises SetupError, UnknownModel, InvalidRequest."""
    endpoint = _endpoint_of(path)
    async with desk_of(broker, model) as desk:
        file = await desk.upload(owner, path.name, "batch", _parts(path))
        wanted = {"input_file_id": file.file_id, "endpoint": endpoint, "completion_window": window}
        return await desk.create(owner, wanted)


async def wait_for_end(broker: BrokerSettings, batch_id: str, owner: str) -> BatchRecord:
    async with desk_of(broker) as desk:
        while (record := await desk.batch(owner, batch_id)).status not in ENDED:
            await asyncio.sleep(_LOOK_EVERY_S)
        return record


async def download(broker: BrokerSettings, batch_id: str, output: Path, errors: Path | None, owner: str) -> BatchRecord:
    """What it has of files. Raises SetupError when it has none yet."""
    async with desk_of(broker) as desk:
        record = await desk.batch(owner, batch_id)
        if not (record.output_file_id or record.error_file_id):
            raise SetupError(f"{batch_id} is {record.status} and has no results to download")
        for file_id, path in ((record.output_file_id, output), (record.error_file_id, errors)):
            if file_id and path is not None:
                with path.open("wb") as target:
                    async for part in desk.content(await desk.file(owner, file_id)):
                        target.write(part)
        return record


def print_record(record: BatchRecord, as_json: bool) -> None:
    if as_json:
        print(json.dumps(as_openai(record)))
        return
    done = f"{record.completed_lines:,} completed, {record.failed_lines:,} failed of {record.total_lines:,}"
    print(f"{record.batch_id}  {record.status:<11}  {done}")
    for error in record.errors:
        print(f"  {f'line {error.line}: ' if error.line is not None else ''}{error.message}", file=sys.stderr)


def _endpoint_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            fields: Any = json.loads(next(line for line in file if line.strip()))
        return str(fields["url"])
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror}") from error
    except StopIteration:
        raise SetupError(f"{path} has no lines: each line is one request") from None
    except (ValueError, KeyError, TypeError) as error:
        raise SetupError(f"the first line of {path} names no url: {error}") from error


async def _parts(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(_PART_BYTES):
            yield part


async def _model(catalogue: ModelCatalogue, wanted: str | None) -> str:
    names = [card.model for card in await catalogue.all()]
    if wanted is None:
        return names[0] if len(names) == 1 else ""
    if wanted not in names:
        raise UnknownModel(f"no model is called {wanted!r} here; there are: {', '.join(names) or 'none yet'}")
    return wanted
