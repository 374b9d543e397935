"""The five services.

* ``gateway`` speaks the OpenAI API, tokenises once, streams answers.
* ``conductor`` knows where every KV block lies and places each request.
* ``prefill`` computes a prompt's KV and writes it into the decode worker's memory.
* ``decode`` generates tokens in a continuous batch.
* ``store-manager`` (folder ``store_manager``) archives the lineage of every block in Postgres.
"""
