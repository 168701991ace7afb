"""The NVMe tier: blocks in segment files, found through an LMDB index.

`kvcascade.tiers.nvme.tier.open_nvme_tier` opens one; see FORMAT.md for every byte on disk.
"""
