"""The gRPC half of the page: services, messages and their comments, read from the .proto file by protoc itself."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from infra.api_page.tables import table

PROTO = "services/contracts/recommend.proto"
_MESSAGES, _SERVICES, _FIELDS, _METHODS = 4, 6, 2, 2
"""Field numbers in descriptor.proto, of which the paths to comments are made."""

Comments = dict[tuple[int, ...], str]
Field = descriptor_pb2.FieldDescriptorProto


def services(root: Path) -> str:
    """Describe each method and each message of the .proto file."""
    file = read_proto(root)
    comments: Comments = {
        tuple(place.path): " ".join((place.leading_comments or place.trailing_comments).split())
        for place in file.source_code_info.location
    }
    return "\n\n".join([*_services(file, comments), *_messages(file, comments)])


def read_proto(root: Path) -> descriptor_pb2.FileDescriptorProto:
    """Read the file with protoc, comments included."""
    with tempfile.NamedTemporaryFile(suffix=".binpb") as out:
        code = protoc.main(["protoc", f"-I{root}", "--include_source_info", f"--descriptor_set_out={out.name}", PROTO])
        if code:
            raise RuntimeError(f"protoc ended with {code}")
        return descriptor_pb2.FileDescriptorSet.FromString(Path(out.name).read_bytes()).file[0]


def _services(file: descriptor_pb2.FileDescriptorProto, comments: Comments) -> Iterator[str]:
    for number, service in enumerate(file.service):
        rows = [
            (
                f"`{method.name}`",
                f"`{_short(method.input_type)}`",
                ("stream of " if method.server_streaming else "") + f"`{_short(method.output_type)}`",
                comments.get((_SERVICES, number, _METHODS, place), ""),
            )
            for place, method in enumerate(service.method)
        ]
        yield f"### {file.package}.{service.name}\n\n" + table(("method", "takes", "gives", "meaning"), rows)


def _messages(file: descriptor_pb2.FileDescriptorProto, comments: Comments) -> Iterator[str]:
    for number, message in enumerate(file.message_type):
        entries = {f".{file.package}.{message.name}.{one.name}": one for one in message.nested_type}
        rows = [
            (
                str(field.number),
                f"`{field.name}`",
                _type(field, entries),
                comments.get((_MESSAGES, number, _FIELDS, place), ""),
            )
            for place, field in enumerate(message.field)
        ]
        about = comments.get((_MESSAGES, number), "")
        yield f"`{message.name}`{': ' + about if about else ''}\n\n" + table(("no.", "field", "type", "meaning"), rows)


def _type(field: Field, entries: dict[str, descriptor_pb2.DescriptorProto]) -> str:
    if field.type_name in entries:
        key, value = entries[field.type_name].field
        return f"map of {_type(key, {})} to {_type(value, {})}"
    plain = Field.Type.Name(field.type).removeprefix("TYPE_").lower()
    name = f"`{_short(field.type_name)}`" if field.type_name else plain
    if field.label == Field.LABEL_REPEATED:
        return f"list of {name}"
    return f"optional {name}" if field.proto3_optional else name


def _short(type_name: str) -> str:
    return type_name.rpartition(".")[2]
