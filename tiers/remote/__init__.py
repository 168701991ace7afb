"""Remote tiers: blocks in an object store or in a Valkey server, shared by many hosts.

`base` is the contract of an engine, `remote_store` the keyed and asynchronous store above it.
Engines are optional: nothing here imports `obstore` or `cryptography` before it is needed.
"""
