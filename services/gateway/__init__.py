"""The edge: OpenAI's HTTP API in front of the bus.

Owns       the tokenisers (text becomes ids here, once, and ids become text here), the life of every HTTP request,
           the attempts to run it, and its one ``RequestDone``.
Consumes   HELLO, LOAD, BYE of the workers; TOKENS of its own subject.
Emits      PLACE to the conductors, JOB to the chosen workers, CANCEL, DONE, ROLLCALL.
Never      touches KV bytes, picks a worker itself, or needs torch or Postgres.
"""
