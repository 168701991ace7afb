"""Files with holes, as `rsync --sparse` and `cp --sparse=always` make them."""

from __future__ import annotations

from pathlib import Path

PAGE = 4096
BLOCK_UNIT_BYTES = 512


def make_sparse(file: Path) -> None:
    """Free the blocks of all pages of zeros in a file."""
    data = file.read_bytes()
    with file.open("r+b", buffering=0) as opened:
        opened.truncate(0)
        for at in range(0, len(data), PAGE):
            page = data[at : at + PAGE]
            if any(page):
                opened.seek(at)
                opened.write(page)
        opened.truncate(len(data))


def has_holes(file: Path) -> bool:
    """Whether a file has fewer blocks than it is long."""
    found = file.stat()
    return found.st_blocks * BLOCK_UNIT_BYTES < found.st_size
