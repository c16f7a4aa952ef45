"""The installed version: a tag's, or how far after it; `0.0.0+unknown` of a mere copy."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("evenflow")
except PackageNotFoundError:
    __version__ = "0.0.0+unknown"
