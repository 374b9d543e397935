"""Load: replays workloads against a gateway and says how it did.

``workload`` turns traces into arrivals and prompts, ``client`` speaks the gateway's HTTP, ``live`` keeps the
schedule, ``record`` is the one row a request that live and simulated runs share, ``slo`` holds the
definitions, ``plots`` and ``report`` make the page. Speaks HTTP only: never touches the bus, the catalog or
an engine. ``sim`` runs the same workloads through a cluster in virtual time, ``cachesim`` through one cache.
"""
