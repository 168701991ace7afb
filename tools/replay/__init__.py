"""`kvcascade replay`: run a request trace through the real manager and policies, in virtual time.

No bytes are moved and no tokens are computed. Backends have slots without memory, and a cost model
sets the end of each transfer. All decisions are made by the code that runs in an engine.
"""
