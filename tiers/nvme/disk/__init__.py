"""The file system seam of the NVMe tier."""
