"""``nereid bench``: load on a running server, and where its time goes."""
