"""The NVMe tier: blocks in segment files, found through an LMDB index.

`path` has the tables of a path and its writer, `segments` the files with payload. `index` checks
LMDB's file, and `disk` has the access to files. FORMAT.md describes every byte on disk.
"""
