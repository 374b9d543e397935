"""Policies of placement, ours and those that others published, behind one short base: all can run live.

A policy answers a :class:`PlaceRequest` over what the conductor knows (see ``base``). ``moonbus`` is
:class:`services.conductor.core.placement.Placer`; the others are here, a module each, with formula and source in their
docstring. ``admission`` says who is turned away, ``registry`` knows them by name.
"""
