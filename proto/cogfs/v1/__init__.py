"""The API of cogfs, version 1: its messages, services and reasons. The ``*_pb2*`` modules are generated."""
