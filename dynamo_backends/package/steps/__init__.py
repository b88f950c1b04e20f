"""Packages of training steps.

`saving` writes one and `loading` reads it; `template` describes nested values, `described` has what
the file says, and `loaded` what `load_step` returns.
"""
