"""Package metadata. `import layerzero` needs torch alone; everything else is an extra.

There are no URLs here, as there is no home of the project yet to name: its forge's address belongs into `project_urls`.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
init = (here / "layerzero" / "__init__.py").read_text(encoding="utf-8")
version = re.search(r'^__version__ = "(.+?)"', init, re.MULTILINE)[1]  # not imported: torch may not be there yet

setup(
    name="torch-layerzero",  # "layerzero" on the package index is something else
    version=version,
    description="ZeRO-1 optimizer states over the whole cluster, ZeRO-3 weights inside a node, for PyTorch",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    author="The layerzero authors",
    keywords=["pytorch", "distributed training", "ZeRO", "FSDP", "sharding", "optimizer states"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["layerzero", "layerzero.*"]),
    package_data={"layerzero": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.11"],
    entry_points={"console_scripts": ["layerzero = layerzero.__main__:main"]},
    extras_require={
        "cli": ["typer", "numpy"],
        "checkpoint": ["safetensors", "xxhash>=3.0", "numpy"],  # torch sends objects between ranks with numpy
        "demo": ["tqdm", "safetensors", "xxhash>=3.0", "numpy"],
        "tensorboard": ["tensorboard"],
        "test": [
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "numpy",
            "tqdm",
            "typer",
            "safetensors",
            "xxhash>=3.0",
            "PyYAML",
            "matplotlib",
            "setuptools>=77",
        ],
        "yaml": ["PyYAML"],
        "megatron": ["megatron-core>=0.16.1,<0.20,!=0.17.*,!=0.18.*", "PyYAML"],
        "accelerate": ["accelerate>=1.15,<2", "safetensors", "xxhash>=3.0", "PyYAML"],
        "transformers": ["transformers>=5.23,<6", "accelerate>=1.15,<2", "safetensors", "xxhash>=3.0", "PyYAML"],
        "lightning": ["lightning>=2.6,<3", "safetensors", "xxhash>=3.0", "PyYAML"],
        "torchtitan": ["torchtitan>=0.3,<0.4", "PyYAML"],
        "plots": ["matplotlib"],
        "bench": ["deepspeed", "matplotlib"],
        "lora": ["peft>=0.21,<1"],
        "docs": ["mkdocs-material>=9.8,<10", "mkdocstrings-python>=2.0,<3"],
        "dev": ["ruff", "mypy", "pre-commit", "coverage"],
    },
)
