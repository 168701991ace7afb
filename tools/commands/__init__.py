"""One file or folder per command: options, work and view. Shared parts lie beside them."""
