"""The names of ``kit`` in one."""

from kit.clients import HttpClient as HttpClient
from kit.clients import Response as Response
from kit.clients import every_client as every_client
