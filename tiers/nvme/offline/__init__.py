"""Reading and repairing a namespace from outside its engines."""
