"""`kvcascade bench`: parts that measurements and `kvcascade replay` share."""
