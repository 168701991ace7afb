"""Commands of the command line: one file or folder per command, with shared modules beside them."""
