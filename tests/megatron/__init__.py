"""Tests of layerzero.megatron, which need Megatron-Core."""

from importlib.util import find_spec

import pytest

if find_spec("megatron") is None:
    pytest.skip("needs megatron-core: pip install --no-deps -r requirements-megatron.txt", allow_module_level=True)
