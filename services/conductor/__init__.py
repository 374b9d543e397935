"""Where shall a request run: the pair of workers with the shortest predicted wait for its first token.

Owns       copies only: who is alive, who holds which block, what is in flight, what work costs. All of it can be
           rebuilt from the workers, so any number of conductors may run and any may be killed.
Consumes   PLACE and WORKERS (as a queue group); HELLO, LOAD, BYE, KV_STORED, KV_EVICTED of all workers; PROGRESS,
           DONE, CANCEL of all requests; PLACED of its replicas.
Emits      Placement or Rejection; PLACED; KV_SYNC questions to owners; ROLLCALL; REFUSE to workers whose spec
           does not fit.
Never      touches a token, a KV byte or the database, and never waits for a worker while it decides.
"""
