"""Fake modules for what a connector imports and does not run: kernels, parsers, models."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types


def is_definition(args, kw):
    return len(args) == 1 and not kw and isinstance(args[0], (type, types.FunctionType))


class FakeClass(type):
    """Class with every attribute. As a decorator it returns what it decorates."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, made := FakeClass(name, (Fake,), {}))
        return made

    def __or__(cls, other):
        return cls

    __ror__ = __getitem__ = __or__

    def __call__(cls, *args, **kw):
        return args[0] if is_definition(args, kw) else super().__call__()


class Fake:
    def __init_subclass__(cls, **kw):
        pass

    def __call__(self, *args, **kw):
        return args[0] if is_definition(args, kw) else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    @classmethod
    def __get_pydantic_core_schema__(cls, source, handler):
        from pydantic_core import core_schema

        return core_schema.any_schema()


class FakeModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, made := FakeClass(name, (Fake,), {}))
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of a list, and all that are below them."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{one}.") for one in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return FakeModule(spec.name)

    def exec_module(self, module):
        module.__path__ = []


def replace(*names):
    sys.meta_path.insert(0, Finder(names))


def skip_init(package, folder):
    """Makes a package whose `__init__` does not run. Its modules are found in the folder."""
    made = types.ModuleType(package)
    made.__path__ = [str(folder)]
    sys.modules[package] = made
