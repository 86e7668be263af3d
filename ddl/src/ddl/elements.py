"""The types of elements, by name: the number that ddl.h gives each (ddl_type), and its bytes."""

from typing import NamedTuple


class ElementType(NamedTuple):
    """A type of elements."""

    number: int  # ddl_type
    nbytes: int


TYPES = {
    "float16": ElementType(0, 2),
    "bfloat16": ElementType(1, 2),
    "float32": ElementType(2, 4),
    "float64": ElementType(3, 8),
    "int8": ElementType(4, 1),
    "int32": ElementType(5, 4),
    "int64": ElementType(6, 8),
    "uint8": ElementType(7, 1),
}
