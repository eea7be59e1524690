"""Modules of Mooncake C++ that this package does not have."""

from __future__ import annotations


def refusal(module: str, why: str, instead: str) -> ImportError:
    """Returns the error of importing such a module: why it is absent, and what to use."""
    name = f"mooncake.{module}"
    return ImportError(f"cannot import {name}: {why}; {instead}", name=name)
