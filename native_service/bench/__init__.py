"""``nereid bench``: load on a running server, and where its time goes."""

import os

# Read when gRPC is imported. What fails is counted and told here; its own lines on stderr would come between.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
