"""Packaging. `pip install .[cpu]` is the tested set; on a cluster `.[gpu]` takes what is installed within a range."""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSIONS = runpy.run_path(str(HERE / "megarl" / "versions.py"))

setup(
    name="megarl",
    version=runpy.run_path(str(HERE / "megarl" / "__init__.py"))["__version__"],
    description="Megatron-based 3D-parallel RL training of language models",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megarl", "megarl.*"]),
    install_requires=[
        "aiohttp>=3.9,<4",
        "matplotlib>=3.8,<4",
        "numpy>=1.26,<3",
        "packaging>=24.2",
        "psutil>=5.9",  # Megatron-core's checkpoint writers wait for ever without it
        "pyarrow>=15",
        "pydantic>=2.9,<3",
        "pyyaml>=6,<7",
        "rich>=13,<16",
        "safetensors>=0.5,<1",
        "starlette>=0.40,<2",
        "tensorboard>=2.16,<3",
        "uvicorn>=0.30,<1",
    ],
    extras_require={
        "cpu": [f"{name}=={version}" for name, version in VERSIONS["CPU"].items()],
        "gpu": [f"{name}{wanted}" for name, wanted in VERSIONS["RANGES"].items()],
        "rewards": ["math-verify[antlr4-13-2]>=0.8,<1", "reasoning-gym>=0.1.19,<1"],
        "dev": ["hypothesis>=6.100,<7", "pytest>=8,<10", "ruff>=0.9,<1"],
    },
)
