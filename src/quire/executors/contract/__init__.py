"""The gRPC contract between an engine and an executor on another machine."""
