"""What runs steps: local torch, ONNX Runtime, transformers, gRPC, and a synthetic one."""
