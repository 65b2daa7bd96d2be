"""Types that cross process boundaries: frozen dataclasses, the event schema, and the gRPC contract."""
