"""The way of a captured graph to a program."""
