"""Azurite, Microsoft's stand-in for Azure Blob Storage: from npm, without installing it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import subprocess
import tempfile
import urllib.request
from email.utils import formatdate
from pathlib import Path

import pytest

from .debian import LIMIT_S, cache_folder
from .remote_servers import HOST, ServerProcess, free_port

VERSION = "3.35.0"
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""Credentials of every Azurite, as its documentation gives them."""
API = "2021-08-06"


class AzuriteServer(ServerProcess):
    """A server whose containers are in memory; it verifies signatures."""

    def __init__(self) -> None:
        port = free_port()
        words = ("--blobHost", HOST, "--blobPort", str(port), "--inMemoryPersistence", "--silent")
        checks = ("--skipApiVersionCheck", "--disableTelemetry")
        super().__init__([str(_program()), *words, *checks], port)

    @property
    def endpoint(self) -> str:
        """URL of the account."""
        return f"http://{self.host}:{self.port}/{ACCOUNT}"

    def make_container(self, name: str) -> None:
        """Create a container."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": API}
        signed = [f"{key}:{value}" for key, value in headers.items()]
        words = ["PUT", *[""] * 11, *signed, f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"]
        key = base64.b64decode(ACCOUNT_KEY)
        digest = hmac.new(key, "\n".join(words).encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        url = f"{self.endpoint}/{name}?restype=container"
        urllib.request.urlopen(urllib.request.Request(url, None, headers, method="PUT")).close()


def _program() -> Path:
    """The program; skips the test where npm cannot bring it."""
    folder = cache_folder() / f"azurite-{VERSION}"
    if not folder.is_dir():
        if shutil.which("npm") is None:
            pytest.skip("no Azurite: it needs npm")
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder()) as made:
            install = ("npm", "install", "--prefix", made, f"azurite@{VERSION}")
            if subprocess.run(install, capture_output=True, timeout=LIMIT_S).returncode:
                pytest.skip("no Azurite: npm cannot download it")
            Path(made).rename(folder)
            Path(made).mkdir()  # which is removed
    return folder / "node_modules" / ".bin" / "azurite-blob"
