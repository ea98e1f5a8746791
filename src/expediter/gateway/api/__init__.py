"""The APIs: each module has the handlers and the shapes of one."""
