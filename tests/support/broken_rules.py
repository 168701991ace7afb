"""A user's module that fails when it is imported."""

raise ZeroDivisionError("as users' modules do")
