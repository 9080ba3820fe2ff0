"""Extensions of the core: each folder here adds itself when it is imported, and with one deleted the others go on working."""

import importlib
import pkgutil

for _each in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
    importlib.import_module(_each.name)
