"""SnoozeML's surface: its gRPC and REST, its settings file, its command."""
