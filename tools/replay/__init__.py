"""`kvcascade replay`: a request trace through the real manager and policies, in virtual time.

No bytes move and nothing is computed: backends have slots without memory, handlers finish when a
cost model says so. Everything that decides is the code that serves.
"""
