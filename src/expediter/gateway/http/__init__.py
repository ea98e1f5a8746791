"""HTTP/1.1 on bare sockets: what a forwarded request goes through, and nothing that knows of models or tenants."""
