"""The schema of the catalog, step by step: ``versions/NNNN_pre_what.py`` runs before the code that needs it is
deployed, ``NNNN_post_what.py`` after. Shipped with the distribution; ``moonbus migrate`` applies them."""
