"""Package metadata. `import layerzero` needs torch alone; everything else is an extra."""

from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent

setup(
    name="torch-layerzero",  # "layerzero" on the package index is something else
    version="0.1.0",
    description="ZeRO-1 optimizer states over the whole cluster, ZeRO-3 weights inside a node, for PyTorch",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["layerzero", "layerzero.*"]),
    package_data={"layerzero": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.11"],
    entry_points={"console_scripts": ["layerzero = layerzero.__main__:main"]},
    extras_require={
        "cli": ["typer"],
        "checkpoint": ["safetensors", "xxhash>=3.0"],
        "demo": ["tqdm", "safetensors", "xxhash>=3.0"],
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
        ],
        "yaml": ["PyYAML"],
        "megatron": ["megatron-core>=0.16,<0.17", "PyYAML"],
        "accelerate": ["accelerate>=1.15,<2", "safetensors", "xxhash>=3.0", "PyYAML"],
        "transformers": ["transformers>=5.23,<6", "accelerate>=1.15,<2", "safetensors", "xxhash>=3.0", "PyYAML"],
        "lightning": ["lightning>=2.6,<3", "safetensors", "xxhash>=3.0", "PyYAML"],
        "bench": ["deepspeed", "matplotlib"],
        "dev": ["ruff", "mypy"],
    },
)
