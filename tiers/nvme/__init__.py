"""The NVMe tier: blocks in segment files, found through an LMDB index.

`kvcascade.tiers.nvme.tier.open_nvme_tier` opens a tier. FORMAT.md describes every byte on disk.
"""
