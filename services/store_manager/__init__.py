"""store-manager: keeps the catalog.

Owns the tables of the Postgres catalog. Consumes the durable feed (hellos, byes, stored and evicted blocks, ends of
requests), hears workers' heartbeats, asks owners for their inventories, and answers lineage, block and totals
queries. Emits rollcalls. Never stands on the request path: with it, or Postgres, down, serving goes on.
"""
