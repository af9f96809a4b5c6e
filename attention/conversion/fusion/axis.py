"""The axis itself, apart from its parts, so that they can import it."""

from attention.axes import Axis

FUSION = Axis("fusion", "attention.conversion.fusion")
