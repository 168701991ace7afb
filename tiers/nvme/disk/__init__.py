"""Access of the NVMe tier to files: the file system, and transfers of payload."""
