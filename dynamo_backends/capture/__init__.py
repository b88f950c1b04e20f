"""Works with Dynamo: explains and counts what it captures, and compiles ahead of calls."""
