"""How the requests of a node come to its instances, and what becomes of them there: one lane for each node.

``SingleLane`` where each instance takes one request at a time, ``DeferredLane`` where the work goes on elsewhere
meanwhile, ``HandOverLane`` where it is done in another process, ``BatchingLane`` where an instance takes batches. Which
it is, is settled once, after set-up.
"""
