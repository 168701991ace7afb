"""The contract of remote engines against a real object store: Ceph RGW."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.ceph import ACCESS_KEY, SECRET_KEY, CephServer

from kvcascade.tiers.remote.base import RemoteEngine
from kvcascade.tiers.remote.engines.object_store import open_object_store

pytest.importorskip("obstore", reason='no object stores: install obstore (extra "s3")')
pytest.importorskip("boto3", reason='no boto3: install moto (extra "dev")')
from remote.test_object_store import ObjectsContract  # noqa: E402 - needs obstore

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

LIMIT_S = 10.0
REGION = "us-east-1"


@pytest.fixture(scope="module")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephServer]:
    server = CephServer(Path(tmp_path_factory.mktemp("ceph")))
    yield server
    server.kill()


class TestCeph(ObjectsContract):
    @pytest.fixture
    def engine(self, ceph: CephServer) -> Iterator[RemoteEngine]:
        self.bucket = uuid.uuid4().hex
        self.client: Any = import_module("boto3").client(
            "s3",
            endpoint_url=ceph.endpoint,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )
        self.client.create_bucket(Bucket=self.bucket)
        settings = {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY}
        made = open_object_store(
            f"s3://{self.bucket}/pre/fix", LIMIT_S, LIMIT_S, ceph.endpoint, REGION, settings
        )
        yield made
        made.close()

    def spoil(self, engine: RemoteEngine, name: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"pre/fix/{name}", Body=data)
