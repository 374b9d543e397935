"""The one thing that pyproject.toml cannot say for good yet: an extension that may be left out.

Where it cannot be compiled, the transfer engine does without it; see shared/transfer/native.py.
"""

from setuptools import Extension, setup

setup(ext_modules=[Extension("shared.transfer._native", ["shared/transfer/_native.c"], optional=True)])
