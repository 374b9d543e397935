"""The Postgres catalog: every KV block's lineage and copies, every worker's lives, every request's end.

``models`` declares the tables, ``fold`` turns a batch of the durable feed into rows, ``sql`` holds the statements,
``repository`` the named operations on them, ``session`` connects, ``migrate`` moves the schema. Only the
store-manager writes; nothing on the request path reads.
"""
