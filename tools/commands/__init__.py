"""The commands as a person meets them: options, help, exit status. What they do lies elsewhere."""
