"""The v2 protocol over gRPC: `inference.GRPCInferenceService`, `grpc.health.v1` and server reflection.

The server is our own, beside KServe's HTTP server and in its event loop: KServe's gRPC service lacks streams, model
control, statistics and numbers as parameters, and its messages have other field numbers than Triton's clients use. The
messages come from a descriptor pool of our own (docs/decisions/0002-private-descriptor-pool.md).
"""
