"""Packages of training steps.

`saving` writes one and `loading` reads it, `described` is what the file says, and `loaded` what
`load_step` returns.
"""
