"""What surrounds Dynamo: explain, coverage, counters, warming up, and how a call is compiled."""
