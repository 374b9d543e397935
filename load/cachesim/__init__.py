"""One cache, replayed traces, every eviction policy: `moonbus load cache-sim`.

``replay`` puts a trace through the very block pool and policies that workers run; ``belady`` is the policy that knows
the future; ``grid`` runs all combinations on all cores; ``show`` and ``cli`` are for people.
"""
