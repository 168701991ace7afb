"""A Ceph cluster of three processes on loopback: a monitor, an OSD in memory, and RGW."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from contextlib import ExitStack
from pathlib import Path

from .debian import libraries, unpacked
from .remote_servers import HOST, ServerProcess, free_port

LIMIT_S = 60
ACCESS_KEY, SECRET_KEY = "id-in-test", "secret-in-test"
OSD_BYTES = 2 << 30
CONFIGURATION = f"""[global]
fsid = {{fsid}}
mon_host = v2:{HOST}:{{port}}
public_addr = {HOST}
cluster_addr = {HOST}
keyring = {{folder}}/keyring
run_dir = {{folder}}
log_file = {{folder}}/$name.log
mon_data = {{folder}}/mon
osd_data = {{folder}}/osd
plugin_dir = {{library}}/ceph
erasure_code_dir = {{library}}/ceph/erasure-code
osd_class_dir = {{library}}/rados-classes
osd_objectstore = memstore
memstore_device_bytes = {OSD_BYTES}
osd_crush_chooseleaf_type = 0
osd_pool_default_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pg_autoscale_mode = off
mon_allow_pool_size_one = true
mon_data_avail_crit = 1
rgw_frontends = beast endpoint={HOST}:{{endpoint}}
"""


class CephServer:
    """The cluster, with one S3 user; skips the test where Ceph is not to be had."""

    def __init__(self, folder: Path) -> None:
        """`folder`: an empty one for its files."""
        installed = all(map(shutil.which, ("ceph-mon", "ceph-osd", "radosgw")))
        root = Path("/") if installed else unpacked("ceph", "ceph-mon", "ceph-osd", "radosgw")
        self._environment = {"PATH": f"{root / 'usr/bin'}{os.pathsep}{os.environ['PATH']}"}
        if not installed:
            self._environment["LD_LIBRARY_PATH"] = libraries(root)
        (library,) = root.glob("usr/lib/*/rados-classes")
        self._folder, self._fsid = folder, str(uuid.uuid4())
        port, self._port = free_port(), free_port()
        self._monitor = f"[v2:{HOST}:{port}]"
        (folder / "ceph.conf").write_text(
            CONFIGURATION.format(
                fsid=self._fsid,
                port=port,
                endpoint=self._port,
                folder=folder,
                library=library.parent,
            )
        )
        with ExitStack() as stack:
            self._start(stack, port)
            self._stack = stack.pop_all()

    def _start(self, stack: ExitStack, port: int) -> None:
        for name in ("mon", "osd"):
            (self._folder / name).mkdir()
        self._make_keys()
        made = ("--monmap", "monmap", "--osdmap", "osdmap", "--keyring", "keyring")
        self._run(
            "monmaptool", "--create", "--fsid", self._fsid, "--addv", "a", self._monitor, "monmap"
        )
        self._run("osdmaptool", "--createsimple", "1", "osdmap")
        self._run("ceph-mon", "--mkfs", "-i", "a", *made)
        self._serve(stack, port, "ceph-mon", "-i", "a")
        self._run("ceph-osd", "--mkfs", "-i", "0")
        self._serve(stack, port, "ceph-osd", "-i", "0")
        self._serve(stack, self._port, "radosgw", "-n", "client.rgw")
        keys = ("--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY)
        user = ("user", "create", "--uid", "test", "--display-name", "test")
        self._run("radosgw-admin", "-n", "client.rgw", *user, *keys)

    def _make_keys(self) -> None:
        every = ("--cap", "mon", "allow *", "--cap", "osd", "allow *")
        self._run("ceph-authtool", "--create-keyring", "keyring", "--gen-key", "-n", "mon.", *every)
        for name in ("osd.0", "client.rgw"):
            self._run("ceph-authtool", "keyring", "--gen-key", "-n", name, *every)

    def _serve(self, stack: ExitStack, port: int, *command: str) -> None:
        """Run a program until the end; it is up once something listens to the port."""
        full = [*command, "-c", str(self._folder / "ceph.conf"), "-f"]
        stack.callback(ServerProcess(full, port, self._environment).kill)

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            [*command, "-c", "ceph.conf"],
            cwd=self._folder,
            env={**os.environ, **self._environment},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert not done.returncode, f"{command[0]}: {done.stderr}"

    @property
    def endpoint(self) -> str:
        """URL of the S3 server."""
        return f"http://{HOST}:{self._port}"

    def kill(self) -> None:
        """SIGKILL to all."""
        self._stack.close()
