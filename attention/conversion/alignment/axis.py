"""The axis itself, apart from its parts, so that they can import it."""

from attention.axes import Axis

ALIGNMENT = Axis("alignment", "attention.conversion.alignment")
