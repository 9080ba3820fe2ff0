"""Packaging of tfdist: `pip install .`"""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
README = ROOT / "README.md"

# The one place of the version, read as text: importing tfdist would need TensorFlow.
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "tfdist" / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)[1]

# Those that the suite was run with. A test holds .github/workflows/ci.yml to them.
PYTHONS = ["3.11", "3.12", "3.13"]

EXAMPLES = ["matplotlib", "tqdm"]
TEST = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "mypy", "ruff", "slipcover>=1.1,<2", "tensorboard"]
TEST += ["psutil", "tabulate"]  # tests/soak
TEST += ["keras-hub>=0.32,<0.33"]  # its models are trained in tests/models; it wants the Keras that tfdist wants

setup(
    name="tfdist",
    version=VERSION,
    description="ZeRO sharding for Keras models on TensorFlow, without changing the model's code",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["tfdist", "tfdist.*"]),
    package_data={"tfdist": ["py.typed"]},
    python_requires=f">={PYTHONS[0]},<3.{int(PYTHONS[-1].removeprefix('3.')) + 1}",
    install_requires=["tensorflow>=2.21,<2.22", "keras>=3.15,<3.16", "tensorflow-datasets", "numpy", "h5py"],
    entry_points={"console_scripts": ["tfdist=tfdist.__main__:main"]},
    extras_require={"examples": EXAMPLES, "test": TEST + EXAMPLES},
    keywords=["tensorflow", "keras", "distributed training", "ZeRO", "FSDP", "sharding"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *[f"Programming Language :: Python :: {python}" for python in PYTHONS],
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
