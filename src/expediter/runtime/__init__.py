"""Runs schedulers for real: the loop of a replica, its process, and the supervisor on the gateway's side."""
