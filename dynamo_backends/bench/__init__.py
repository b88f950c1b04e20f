"""`dynamo-backends bench`: models, measuring each in a process of its own, results and pages."""
