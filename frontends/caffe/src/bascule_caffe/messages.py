"""Caffe's messages: classes by name, reading and writing them as text and as binary files, and blobs as arrays.

The classes come from the table in schema.py. Fields are Caffe's own, but for a blob's numbers, which are raw bytes:
`blob_array` and `array_blob` convert them.

A layer that is read from text knows its place (`location`, as "net.prototxt:12"). Its fields that Caffe itself does
not have stay in `foreign` as text: other branches of Caffe have hundreds, and only the layer can tell what they mean.
"""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf import message as protobuf
from google.protobuf import text_format
from google.protobuf.message import Message

from bascule_caffe import schema
from bascule_caffe.errors import FileError, NetError
from lms.files import aside

_CLASSES = schema.build()

BlobProto = _CLASSES["BlobProto"]
BlobShape = _CLASSES["BlobShape"]
Datum = _CLASSES["Datum"]
FillerParameter = _CLASSES["FillerParameter"]
LayerParameter = _CLASSES["LayerParameter"]
Model = _CLASSES["Model"]
NetParameter = _CLASSES["NetParameter"]
NetState = _CLASSES["NetState"]
ParamSpec = _CLASSES["ParamSpec"]
SolverParameter = _CLASSES["SolverParameter"]
SolverState = _CLASSES["SolverState"]
TransformationParameter = _CLASSES["TransformationParameter"]

_LAYER_FIELDS = {
    "layer": set(LayerParameter.DESCRIPTOR.fields_by_name),
    "layers": set(_CLASSES["V1LayerParameter"].DESCRIPTOR.fields_by_name),
}
_TOKEN = re.compile(r"""\#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[{}<>\[\]:;,]|[^\s{}<>\[\]:;,"'\#]+""")


class _Block:
    """A layer's block in a text: the lines it takes, its name and its type."""

    def __init__(self, first: int) -> None:
        self.first = self.last = first
        self.name = self.type = "?"


def parse_text(path: str | Path, kind: type[Message]) -> Message:
    """Reads a message of the class `kind` from a text file (.prototxt).

    Raises:
        FileError: the file cannot be read, or is not text.
        NetError: the text is no such message; says the file, the line, the layer and the fields that are allowed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # Windows' editors begin a file with a mark
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: is not text in UTF-8, so save it as that: {error}") from error
    return parse_string(text, kind, str(path))


def parse_string(text: str, kind: type[Message], source: str = "<text>") -> Message:
    """Reads a message from a text; `source` is what errors call it. Raises NetError as `parse_text` does."""
    blocks: list[_Block] = []
    message = kind()
    try:
        text_format.Parse(_marked(text, source, blocks), message)
    except text_format.ParseError as error:
        raise NetError(_explained(error, source, blocks)) from error
    return message


def format_text(message: Message) -> str:
    """A message as text, with Caffe's own fields."""
    copy = type(message)()
    copy.CopyFrom(message)
    clear_private(copy)
    return str(text_format.MessageToString(copy))


def clear_private(message: Message) -> None:
    """Removes the fields that Caffe's files do not have from a message and all within it."""
    for field, value in list(message.ListFields()):
        if field.number >= schema.PRIVATE:
            message.ClearField(field.name)
        elif field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                clear_private(part)


def read_binary(path: str | Path, kind: type[Message]) -> Message:
    """Reads a message from a binary file (.caffemodel, .solverstate, .binaryproto).

    Raises:
        FileError: the file cannot be read, is empty, cut, or of another kind.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error}") from error
    if not data:
        raise FileError(f"{path}: is empty; a {kind.DESCRIPTOR.name} was expected: copy or make it again")
    try:
        return kind.FromString(data)
    except protobuf.DecodeError as error:
        raise FileError(
            f"{path}: its {len(data)} bytes are no {kind.DESCRIPTOR.name}: it is cut, damaged or of another kind. "
            "Copy or make it again"
        ) from error


def write_binary(path: str | Path, message: Message) -> None:
    """Writes a message to a binary file, as `write_file`."""
    write_file(path, message.SerializeToString(deterministic=True))


def write_file(path: str | Path, content: bytes) -> None:
    """Writes a file, as `writing`."""
    with writing(path) as part:
        part.write_bytes(content)


@contextmanager
def writing(path: str | Path) -> Iterator[Path]:
    """Yields a path to write to, and renames it at the end: nobody sees half a file, and a failure leaves the old one.

    Raises:
        FileError: the file cannot be written.
    """
    try:
        with aside(Path(path)) as part:
            yield part
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path}: cannot be written: {error}") from error


class LateFile(io.FileIO):
    """A file for HDF5 and PyTorch, which crash the process if a write fails. Closing it raises the first OSError."""

    _failed: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes all of it, if it can."""
        left = memoryview(data).cast("B")
        nbytes = len(left)
        try:
            while left:
                left = left[super().write(left) or 0 :]
        except OSError as error:
            self._failed = self._failed or error
        return nbytes

    def truncate(self, size: int | None = None) -> int:
        """Cuts or lengthens the file to `size` bytes, if it can."""
        size = self.tell() if size is None else size
        try:
            super().truncate(size)
        except OSError as error:
            self._failed = self._failed or error
        return size

    def __exit__(self, *raised: object) -> None:
        self.close()
        if self._failed is not None:
            raise self._failed


def blob_shape(blob: Message) -> tuple[int, ...]:
    """A blob's shape. Old files have four numbers in place of a shape; Caffe writes neither for a scalar."""
    if any(blob.HasField(name) for name in ("num", "channels", "height", "width")):
        return (blob.num, blob.channels, blob.height, blob.width)
    return tuple(blob.shape.dim)


def blob_array(blob: Message, source: str = "the blob") -> npt.NDArray[np.floating]:
    """A blob's numbers as an array of its shape, which must not be written to.

    Raises:
        FileError: there are more or fewer numbers than the shape says.
    """
    data = blob.double_data or blob.data
    shape, dtype = blob_shape(blob), np.dtype("<f8" if blob.double_data else "<f4")
    nbytes = sum(map(len, data))
    if nbytes != int(np.prod(shape, dtype=np.int64)) * dtype.itemsize:
        raise FileError(
            f"{source}: its shape is {shape}, but it has {nbytes} bytes of {dtype.name}: the file is damaged"
        )
    return np.frombuffer(data[0] if len(data) == 1 else b"".join(data), dtype).reshape(shape)


def array_blob(array: npt.NDArray[np.floating]) -> Message:
    """A BlobProto of an array of float32 or float64."""
    double = array.dtype == np.float64
    blob = BlobProto(shape=BlobShape(dim=array.shape))
    (blob.double_data if double else blob.data).append(array.astype("<f8" if double else "<f4", order="C").tobytes())
    return blob


def foreign(parameter: Message, name: str) -> str | None:
    """The text of a layer's field that is not Caffe's own, such as "{ zoom_factor: 8 }"; None if it is not there."""
    return next((str(field.text) for field in parameter.foreign if field.name == name), None)


def _marked(text: str, source: str, blocks: list[_Block]) -> str:
    """The text with each layer's place written into its block, and with fields that are not Caffe's as `foreign`.

    Lines keep their numbers. Fills `blocks` with the layers.
    """
    out: list[str] = []
    copied = 0
    stack: list[str] = []  # the names of the blocks around a token
    open_blocks: list[_Block] = []
    foreign: tuple[str, int, int] | None = None  # a field that is not Caffe's: its name, where its value begins, depth
    previous = value_of = ""
    for token, start, line in _tokens(text):
        if foreign and len(stack) == foreign[2] and token not in (":", "{", "<", "["):
            # A scalar: this token is the value.
            out.append(_foreign(foreign[0], text[foreign[1] : start + len(token)]))
            copied, foreign, previous = start + len(token), None, ""
            continue
        if token in ("{", "<", "["):
            stack.append(previous if token != "[" else token)
            if foreign is None and stack[-1] in _LAYER_FIELDS and "layers" not in stack[:-1]:
                out += [text[copied : start + 1], f' location: "{_escaped(source)}:{line}" ']
                copied = start + 1
                open_blocks.append(_Block(line))
                blocks.append(open_blocks[-1])
        elif token in ("}", ">", "]"):
            if stack:
                closed = stack.pop()
                if foreign and len(stack) == foreign[2]:
                    out.append(_foreign(foreign[0], text[foreign[1] : start + 1]))
                    copied, foreign = start + 1, None
                elif foreign is None and open_blocks and closed in _LAYER_FIELDS:
                    open_blocks.pop().last = line
        elif token == ":":
            value_of = previous
            continue
        elif foreign is None and stack and stack[-1] in _LAYER_FIELDS and open_blocks:
            if value_of in ("name", "type"):
                setattr(open_blocks[-1], value_of, token[1:-1] if token[0] in "\"'" else token)
            elif not value_of and token.isidentifier() and token not in _LAYER_FIELDS[stack[-1]]:
                out.append(text[copied:start])
                foreign, copied = (token, start + len(token), len(stack)), start
        previous, value_of = token, ""
    return "".join(out) + text[copied:]


def _tokens(text: str) -> Iterator[tuple[str, int, int]]:
    """Yields the tokens of a text with their positions and their lines, less comments."""
    line, seen = 1, 0
    for match in _TOKEN.finditer(text):
        line += text.count("\n", seen, match.start())
        seen = match.start()
        if not match[0].startswith("#"):
            yield match[0], match.start(), line


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _foreign(name: str, text: str) -> str:
    value = re.sub(r"\A[\s:]*", "", text)
    return f'foreign {{ name: "{name}" text: "{_escaped(value)}" }}' + "\n" * text.count("\n")


def no_field(kind: type[Message], name: str) -> str:
    """Says that a message has no such field, and which it has."""
    allowed = sorted(set(kind.DESCRIPTOR.fields_by_name) - {"location", "foreign"})
    close = difflib.get_close_matches(name, allowed, 1)
    meant = f" (did you mean '{close[0]}'?)" if close else ""
    return f"{kind.DESCRIPTOR.name} has no field '{name}'{meant}; it has {', '.join(allowed)}"


def _explained(error: text_format.ParseError, source: str, blocks: list[_Block]) -> str:
    """What is wrong in a text, with the file, the line, the layer and what is allowed."""
    line = error.GetLine() or 1
    layer = next((f"layer '{b.name}' ({b.type}): " for b in blocks if b.first <= line <= b.last), "")
    said = re.sub(r"^\d+:\d+ : ('.*': )?", "", str(error))  # less the line's text, which has our marks
    if unknown := re.search(r'"caffe\.(\w+)" has no field named "(\w+)"', said):
        said = no_field(_CLASSES[unknown[1]], unknown[2])
    elif twice := re.search(r'should not have multiple "(\w+)" fields', said):
        said = f"'{twice[1]}' is there twice: keep one"
    elif unknown := re.search(r'Enum type "caffe\.(\w+)\.(\w+)" has no value (?:named )?"?(\w+)"?', said):
        values = _CLASSES[unknown[1]].DESCRIPTOR.enum_types_by_name[unknown[2]].values
        said = f"'{unknown[3]}' is no {unknown[2].lower()}; allowed are {', '.join(value.name for value in values)}"
    return f"{source}:{line}: {layer}{said}"
