"""The monitoring service: what the GPUs and the runs do, over HTTP on this machine, and runs started and stopped.

fastapi, uvicorn and prometheus-client (the extra `service`) are imported only below this package and when it is used.
"""
