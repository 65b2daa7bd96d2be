"""A gRPC client of the recommender, made from the schema's descriptor instead of generated code."""

from typing import Any

import grpc
import grpc.aio
from google.protobuf.message_factory import GetMessageClass

from services.contracts import recommend_pb2


class RecommenderStub:
    """Each RPC of the service as an attribute: `stub.Recommend(message)`, over a blocking or an asyncio channel."""

    def __init__(self, channel: grpc.Channel | grpc.aio.Channel) -> None:
        service = recommend_pb2.DESCRIPTOR.services_by_name["Recommender"]
        for method in service.methods:
            call = channel.unary_unary(
                f"/{service.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the schema has no RPC {name}")
