"""Random graphs of operators that compilers rewrite, on values that come after the first call.

A compiler that replaces `log(exp(x))` by `x`, or leaves out a cast to float16 and back, is right
for random numbers around 0 and wrong for others. Each graph has two to six calls; it is compiled
with usual values, and called with extreme ones. A seed stands for one graph.
"""
