"""The one thing that pyproject.toml cannot say for good yet: extensions that may be left out.

Where they cannot be compiled, the transfer engine and the conductor do without them; see shared/transfer/native.py and
services/conductor/core/survey.py. The conductor's comes to the same numbers as Python does, so no two operations of it
may become one.
"""

from setuptools import Extension, setup

setup(ext_modules=[
    Extension("shared.transfer._native", ["shared/transfer/_native.c"], depends=["setup.py"], optional=True),
    Extension("services.conductor.core._native", ["services/conductor/core/_native.c"], depends=["setup.py"],
              optional=True, extra_compile_args=["-ffp-contract=off"]),
])
