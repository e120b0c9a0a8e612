"""Tinker's interface to a policy: clients in this process, and an HTTP server for them.

`client` has the training and the sampling client. `python -m torchtitan.rl.serve` starts the server.
A request goes through `http` (limits and access), `service` (endpoints, with `requests` and `wire` to
read JSON and protobuf) and `policy` (commands for all ranks) to the client; `results` keeps the
result until it is fetched.
"""
