"""Which replica gets a request: decisions of the cluster, each a pure function of request and fleet."""
