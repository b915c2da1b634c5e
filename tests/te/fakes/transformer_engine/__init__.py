"""Transformer Engine with the signatures of its releases, in plain PyTorch on any device.

It refuses what the library refuses, and under ``autocast`` it rounds to the values of float8, so that a test sees
whether low precision was on. ``tests.te.fakes.install`` puts it in the place of the package.
"""

__version__ = "2.20.2"
