"""Check that :mod:`layerzero.megatron` supports the installed Megatron-Core release."""

from __future__ import annotations

# By (major, minor): the latest patch release, which the tests use, and the Megatron-LM tag that has its training loop.
SUPPORTED = {(0, 16): ("0.16.1", "core_v0.16.1"), (0, 19): ("0.19.2", "core_v0.19.0")}


def version() -> str:
    """Return the version of the installed Megatron-Core, such as ``"0.19.2"``."""
    import megatron.core  # noqa: PLC0415

    return str(megatron.core.__version__)


def release() -> tuple[int, int]:
    """Return the major and minor version of the installed Megatron-Core."""
    major, minor = version().split(".")[:2]
    return int(major), int(minor)


def version_error() -> RuntimeError | None:
    """Return an error that names the supported versions; None if the installed version is supported."""
    if release() in SUPPORTED:
        return None
    releases = " or ".join(f"{major}.{minor}.*" for major, minor in SUPPORTED)
    tested = " and ".join(release for release, _ in SUPPORTED.values())
    return RuntimeError(
        f"layerzero.megatron does not support megatron-core {version()}: it replaces and calls functions that differ "
        f"between releases. Install megatron-core {releases}; the tests run on {tested}"
    )
