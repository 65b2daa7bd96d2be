"""What crosses a process boundary: frozen types, the event schema, and the gRPC contract with its generated code."""
