"""The contract of remote engines against Azurite, a server for Azure's blobs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest
from support.azurite import ACCOUNT, ACCOUNT_KEY, AzuriteServer

from kvcascade.config.options import At
from kvcascade.config.remote import parse_remote
from kvcascade.tiers.remote.base import RemoteEngine
from kvcascade.tools.commands.check.config_check import problem_of

pytest.importorskip("obstore", reason='no object stores: install obstore (extra "s3")')
from remote.test_object_store import ObjectsContract  # noqa: E402 - needs obstore

from kvcascade.tiers.remote.engines.object_store import (  # noqa: E402 - as above
    ObjectStoreEngine,
    open_object_store,
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
LIMIT_S = 10.0


@pytest.fixture(scope="module")
def azurite() -> Iterator[AzuriteServer]:
    server = AzuriteServer()
    yield server
    server.kill()


@pytest.fixture
def opened(azurite: AzuriteServer) -> Iterator[Callable[..., ObjectStoreEngine]]:
    """Opens a container, which is made unless it is named."""
    made: list[ObjectStoreEngine] = []

    def open_it(container: str = "", key: str = ACCOUNT_KEY) -> ObjectStoreEngine:
        if not container:
            azurite.make_container(container := uuid.uuid4().hex)
        url, settings = f"az://{container}/pre/fix", {"account_name": ACCOUNT, "account_key": key}
        made.append(open_object_store(url, LIMIT_S, LIMIT_S, azurite.endpoint, settings=settings))
        return made[-1]

    yield open_it
    for engine in made:
        engine.close()


class TestAzure(ObjectsContract):
    @pytest.fixture
    def engine(self, opened: Callable[..., ObjectStoreEngine]) -> RemoteEngine:
        return opened()

    def spoil(self, engine: RemoteEngine, name: str, data: bytes) -> None:
        assert isinstance(engine, ObjectStoreEngine)
        engine._obstore.put(engine._store, name, data)


def test_problems_have_their_sentences(opened: Callable[..., ObjectStoreEngine]) -> None:
    options = parse_remote(At("remote"), {"url": "az://container/kv"})
    for engine, wanted in (
        (opened(), None),
        (opened("nobody-made-this"), "has no such bucket; create it"),
        (opened(key="AAAA" + ACCOUNT_KEY[4:]), "refuses the credentials"),
    ):
        found = problem_of(engine, options)
        assert found is None if wanted is None else found and wanted in found
