"""Tinker's interface to a policy: clients in this process, and an HTTP server for Tinker's client.

`client` has the training client, `local_sampling` the sampling client. `torchtitan serve`
starts the server. A request goes through `http` (limits and access), `service` (endpoints; `requests`
and `wire` parse JSON and protobuf) and `policy` (commands for all ranks) to the training client.
`results` keeps each result until the client fetches it.
"""
