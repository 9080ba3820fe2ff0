"""Packaging of tfdist: `pip install .`"""

import pathlib

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
README = ROOT / "README.md"

EXAMPLES = ["matplotlib", "tqdm"]
TEST = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "tensorboard"]

setup(
    name="tfdist",
    version="0.1.0",
    description="ZeRO sharding for Keras models on TensorFlow, without changing the model's code",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["tfdist", "tfdist.*"]),
    package_data={"tfdist": ["py.typed"]},
    python_requires=">=3.11",
    install_requires=["tensorflow>=2.21,<2.22", "keras>=3.15,<4", "tensorflow-datasets", "numpy", "h5py"],
    entry_points={"console_scripts": ["tfdist=tfdist.launch.cli:main"]},
    extras_require={"examples": EXAMPLES, "test": TEST + EXAMPLES},
    keywords=["tensorflow", "keras", "distributed training", "ZeRO", "FSDP", "sharding"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
