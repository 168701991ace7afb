"""One writer per path: presence table, block table, writer, and the reads of every node."""
