"""The embedded stack: NATS, Postgres and the five services as processes of one machine.

Owns the processes, their logs, the data directory and the signals; the only code that knows every service.
It talks to them as anybody would (environment in, ready line out, bus and HTTP), so the stack it runs behaves
as a cluster does.

* ``plan``: pure; settings and what the machine has → units, in order.
* ``checks``: the settings of what would be started, before it is.
* ``resources``: what the machine has.
* ``supervise``: starts units, waits until they are ready, restarts what crashed, stops in reverse.
* ``embedded``: NATS and Postgres from their wheels.
* ``state``: the file by which other commands find a running stack.
* ``stack``: all of it as one context manager.
* ``status``: what a person sees. ``demo``: ``moonbus demo``. ``tables``: those of the demo and of other commands.
"""
