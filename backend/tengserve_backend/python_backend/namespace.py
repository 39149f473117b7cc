"""Imports of a user's model: each instance has its own copies of the model's files, under names of its own.

Two models may both have a `helper.py` beside their `model.py`; in one process they would get each other's. So the files
of a model are modules of a private package, and an `import` in one of them looks there first: in the version folder,
then in the model's. Nothing is put on `sys.path`, and no other module of the process sees a difference.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import itertools
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

from tengserve_backend.errors import ConfigurationError

_PACKAGE = "_tengserve_model_"
_numbers = itertools.count()
_namespaces: dict[str, Namespace] = {}


class Namespace:
    """The modules of one instance. Ends with `close`.

    Args:
        folders: where its modules are looked for, in order.
        provided: modules that its files find by these names wherever they import them.
    """

    def __init__(self, folders: Sequence[Path], provided: Mapping[str, types.ModuleType]) -> None:
        self.package = f"{_PACKAGE}{next(_numbers)}"
        self._folders = [str(folder) for folder in folders]
        self._provided = dict(provided)
        self._builtins = dict(vars(builtins)) | {"__import__": self._import}
        package = types.ModuleType(self.package)
        package.__path__ = self._folders
        sys.modules[self.package] = package
        _namespaces[self.package] = self
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())

    def load(self, filename: str) -> types.ModuleType:
        """Run a file of the first folder as a module.

        Raises:
            Exception: whatever the file raises.
        """
        name = f"{self.package}.{filename.removesuffix('.py')}"
        path = str(Path(self._folders[0], filename))
        spec = importlib.util.spec_from_file_location(name, path, loader=_Loader(name, path))
        if spec is None or spec.loader is None:
            raise ConfigurationError(f"{filename} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        # As an import does it: so `from . import model` finds it, and what is found by its dotted name.
        setattr(sys.modules[self.package], filename.removesuffix(".py"), module)
        spec.loader.exec_module(module)
        return module

    def close(self) -> None:
        """Forget the modules; those who still hold them keep them."""
        _namespaces.pop(self.package, None)
        # A copy, as other threads import meanwhile.
        for name in [name for name in list(sys.modules) if name == self.package or name.startswith(self.package + ".")]:
            sys.modules.pop(name, None)

    @property
    def builtins(self) -> dict[str, Any]:
        """What its modules have as their `__builtins__`."""
        return self._builtins

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> types.ModuleType:
        if level == 0:
            if (provided := self._provided.get(name)) is not None:
                return provided
            top = name.partition(".")[0]
            if self._has(top):
                module = importlib.import_module(f"{self.package}.{name}")
                if not fromlist:
                    return sys.modules[f"{self.package}.{top}"]
                for attribute in fromlist:
                    # `from package import module` loads the module, as the built-in does.
                    if attribute != "*" and not hasattr(module, attribute) and hasattr(module, "__path__"):
                        submodule = f"{module.__name__}.{attribute}"
                        if importlib.util.find_spec(submodule) is not None:
                            importlib.import_module(submodule)
                return module
        return builtins.__import__(name, globals, locals, fromlist or (), level)

    def _has(self, top: str) -> bool:
        """Whether a top-level name is a file of the model; never one of Python's own."""
        if top in sys.stdlib_module_names:
            return False
        if f"{self.package}.{top}" in sys.modules:
            return True
        return any(
            Path(folder, f"{top}.py").is_file() or Path(folder, top, "__init__.py").is_file()
            for folder in self._folders
        )


class _Loader(SourceFileLoader):
    """Gives a module of a namespace the namespace's `import` before it runs."""

    def exec_module(self, module: types.ModuleType) -> None:
        namespace = _namespaces.get(module.__name__.partition(".")[0])
        if namespace is not None:
            module.__dict__["__builtins__"] = namespace.builtins
        super().exec_module(module)


class _Finder(MetaPathFinder):
    """Finds the modules of all namespaces, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """See MetaPathFinder."""
        if not fullname.startswith(_PACKAGE):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec
