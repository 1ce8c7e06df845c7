"""A Thrift service around a ``torchpipe_py`` pipe."""
