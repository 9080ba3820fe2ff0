"""Programs that import the launcher without `tfdist/__init__.py` and those of two of its packages, hence without TensorFlow.

That takes 0.1 s, not 5.
"""

import pathlib

import tfdist

# What such a program begins with.
PACKAGES = f"""
import os, sys, types
for name in ("tfdist", "tfdist.extensions", "tfdist.extensions.pipeline", "tfdist.runtime"):
    package = types.ModuleType(name)
    package.__path__ = [os.path.join({str(pathlib.Path(tfdist.__file__).parent.parent)!r}, *name.split("."))]
    sys.modules[name] = package
"""
LAUNCHER = f"""{PACKAGES}
from tfdist.tools.launch.cli import main
assert "tensorflow" not in sys.modules
sys.exit(main())
"""
